"""Name a model on a command line.

- ``zgcm:DIR``: a decoder that ``zgcm_model.save_pretrained`` wrote, with its tokenizer.json beside it.
- ``hf:DIR``: a model and tokenizer of ``transformers``.
- ``python:MODULE:NAME``: NAME() of a module, searched in the current folder first, returns the model.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from zgcm_eval.adapters.huggingface import load_huggingface
from zgcm_eval.adapters.zgcm import load_zgcm
from zgcm_eval.protocol import ScoringModel


def load_model(name: str, *, tokenizer: str | None = None, device: str = "cpu") -> ScoringModel:
    """Load the model that a name stands for.

    Args:
        name: see the table above.
        tokenizer: ``tokenizer.json`` of a ZGCM model; None looks beside its weights.
        device: where the model goes; a ``python:`` model chooses itself.

    Returns:
        The model.

    Raises:
        FileNotFoundError: a folder or file is missing.
        ImportError: an optional package or the named module is missing.
        ValueError: the name has another form, or what it stands for is no language model.
    """
    kind, _, rest = name.partition(":")
    if kind == "zgcm" and rest:
        return load_zgcm(rest, tokenizer or Path(rest) / "tokenizer.json", device=device)
    if kind == "hf" and rest:
        if not Path(rest).is_dir():
            raise FileNotFoundError(f"{rest} is missing; give the folder of a saved model and tokenizer")
        return load_huggingface(rest, device=device)
    if kind == "python" and rest.count(":") == 1:
        return _call(*rest.split(":"))
    raise ValueError(f"model {name!r} is not zgcm:DIR, hf:DIR or python:MODULE:NAME")


def _call(module: str, name: str) -> ScoringModel:
    # A console script, unlike ``python -m``, does not look in the current folder.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    factory = getattr(importlib.import_module(module), name, None)
    if not callable(factory):
        raise ValueError(f"module {module!r} has no function {name!r}")
    model: Any = factory()
    if not isinstance(model, ScoringModel):
        raise ValueError(f"{module}:{name} returned {type(model).__name__}; it lacks methods of ScoringModel")
    return model
