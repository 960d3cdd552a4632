"""The only file that imports Transformer Engine, and the one place for what differs between its versions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def load_te() -> Any:
    """Import ``transformer_engine.pytorch``.

    Returns:
        The module.

    Raises:
        ImportError: it is missing or cannot be loaded here; names the extra to install.
    """
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError) as error:
        raise ImportError(
            'Transformer Engine cannot be loaded; on a machine with an NVIDIA GPU run pip install "zgcm-model[te]"'
        ) from error
    return te


def load_te_recipes() -> Any:
    """Import ``transformer_engine.common.recipe``.

    Returns:
        The module.

    Raises:
        ImportError: Transformer Engine is missing or cannot be loaded here; names the extra to install.
    """
    load_te()
    from transformer_engine.common import recipe

    return recipe


class Fp8Region:
    """Opens Transformer Engine's FP8 region without letting it update amaxes and scales.

    Args:
        recipe: Transformer Engine's.

    Raises:
        ImportError: Transformer Engine is missing or cannot be loaded here; names the extra to install.

    Source: Transformer Engine 2.0 to 2.18. Up to 2.8 there is ``fp8_autocast(fp8_recipe=)`` and the manager of its
    global state is in ``pytorch.fp8``; from 2.9 on ``autocast(recipe=)`` and ``pytorch.quantization``.
    """

    def __init__(self, recipe: Any) -> None:
        te = load_te()
        if hasattr(te, "autocast"):
            from transformer_engine.pytorch.quantization import FP8GlobalStateManager

            self._autocast, self._keyword = te.autocast, "recipe"
        else:
            from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

            self._autocast, self._keyword = te.fp8_autocast, "fp8_recipe"
        self._manager, self._recipe = FP8GlobalStateManager, recipe

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Compute in FP8 inside.

        Yields:
            Nothing.
        """
        region = self._autocast(enabled=True, **{self._keyword: self._recipe})
        region.__enter__()
        try:
            # Whoever asks first updates all gradients in its backward pass: a walk over every module.
            self._manager.is_first_fp8_module()
            yield
        finally:
            # At its end, with gradients on, a region updates every module that ever ran.
            with torch.no_grad():
                region.__exit__(None, None, None)
