import contextlib
import re

import pytest
import torch
from jaxtyping import TypeCheckError

from zgcm_model import ModelConfig

torch.set_num_threads(1)


@pytest.fixture
def toy() -> ModelConfig:
    """Seven layers (one global), window 4, two query heads per key head."""
    return ModelConfig(97, 32, 48, 7, 4, 2, 16, window=4, max_positions=512)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def refuses():
    """Expect a ValueError that matches; with the shape checks on, they may refuse the call first."""

    @contextlib.contextmanager
    def expect(match):
        with pytest.raises((ValueError, TypeCheckError)) as caught:
            yield
        if isinstance(caught.value, ValueError):
            assert re.search(match, str(caught.value)), str(caught.value)

    return expect
