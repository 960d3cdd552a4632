"""Data that several tests of zgcm-train read; none may change it."""

from pathlib import Path

import pytest
import torch

from zgcm_testing.tiny_runs import write_tiny_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_tiny_data(folder)
    return folder


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
