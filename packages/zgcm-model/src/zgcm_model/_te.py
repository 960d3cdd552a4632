"""The only file that imports Transformer Engine."""

from typing import Any


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
