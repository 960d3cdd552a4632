"""Asking for DALI where it is missing or broken names the extra to install."""

import sys
from types import ModuleType

import pytest

from zgcm_data import Loader, ShardSet


def test_a_missing_dali_is_an_error_that_names_the_extra(
    shards25: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", None)
    with pytest.raises(ImportError, match=r'pip install "zgcm-data\[dali\]"'):
        Loader(shards25, 5, backend="dali")


def test_p04_a_dali_that_cannot_find_its_driver_is_the_same_error(
    shards25: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "nvidia", Broken("nvidia"))
    monkeypatch.setitem(sys.modules, "nvidia.dali", Broken("nvidia.dali"))
    with pytest.raises(ImportError, match=r'pip install "zgcm-data\[dali\]"'):
        Loader(shards25, 5, backend="dali")


def test_auto_needs_no_dali(shards25: ShardSet) -> None:
    assert Loader(shards25, 5).backend == "python"
