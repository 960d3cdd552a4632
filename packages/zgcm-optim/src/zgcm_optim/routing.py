"""Which parameter is updated by which algorithm, decided by what its module does.

Adam takes

* the weights of embedding modules (``torch.nn.Embedding``, ``torch.nn.EmbeddingBag`` and their subclasses);
* the weights of the output head, which is found in this order: modules that a module of the model lists in an
  attribute ``output_head_modules``; the module that a module's ``get_output_embeddings()`` returns; and every
  module with a 2-D ``weight`` whose row count equals the ``num_embeddings`` of an embedding of the same model
  and which has the attributes ``in_features`` and ``out_features``, as a linear layer has;
* everything that is not a matrix, and matrices with a single row or column.

Muon takes all other matrices. Names of parameters and aspect ratios play no part, so a renamed model routes
the same. A parameter that two modules share (a tied head) goes to Adam if either role says so. A hidden layer
whose output happens to be as wide as the vocabulary would be taken for a head: name the true heads in
``output_head_modules`` then, which switches the comparison of widths off.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

Group = dict[str, Any]


def route_parameters(
    model: nn.Module, *, weight_decay: float | None = None, decay_vectors: bool = False
) -> list[Group]:
    """Split a model's trainable parameters into groups for ``Muon``.

    Args:
        model: the model, sharded or not.
        weight_decay: the decay of every group; None for the optimizer's default.
        decay_vectors: whether parameters with fewer than two dims decay too; by default they do not.

    Returns:
        Groups of named parameters, empty ones left out: matrices for Muon, embeddings and heads for Adam, the
        rest for Adam. Every trainable parameter is in exactly one.

    Raises:
        ValueError: the model has no trainable parameter.

    Source: published ZGCM-1 training setup (embeddings and head decay, vectors do not).
    """
    vocabulary = {id(parameter) for module in _vocabulary_modules(model) for parameter in module.parameters()}
    matrices, tables, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            vectors.append((name, parameter))
        elif id(parameter) in vocabulary or not _is_matrix(parameter):
            tables.append((name, parameter))
        else:
            matrices.append((name, parameter))
    if not (matrices or tables or vectors):
        raise ValueError("the model has no trainable parameter; check requires_grad")
    decay = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups: list[Group] = [
        {"params": matrices, "algorithm": "muon", **decay},
        {"params": tables, "algorithm": "adam", **decay},
        {"params": vectors, "algorithm": "adam", **(decay if decay_vectors else {"weight_decay": 0.0})},
    ]
    return [group for group in groups if group["params"]]


def describe_routing(groups: Sequence[Group]) -> str:
    """Return a table of what each group holds.

    Args:
        groups: from ``route_parameters``, or an optimizer's ``param_groups``.

    Returns:
        One line per parameter: algorithm, shape, decay, name.
    """
    rows = [("algorithm", "shape", "decay", "parameter")]
    for group in groups:
        decay = group.get("weight_decay", "default")
        for name, parameter in _named(group):
            shape = " x ".join(str(size) for size in parameter.shape) or "scalar"
            rows.append((group.get("algorithm", "muon"), shape, str(decay), name))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    return "\n".join(lines)


def _named(group: Group) -> Iterator[tuple[str, Tensor]]:
    names = group.get("param_names")
    for index, entry in enumerate(group["params"]):
        if isinstance(entry, tuple):
            yield entry
        else:
            yield names[index] if names else f"#{index}", entry


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.ndim == 2 and min(parameter.shape) > 1


def _vocabulary_modules(model: nn.Module) -> list[nn.Module]:
    embeddings = [module for module in model.modules() if isinstance(module, _EMBEDDINGS)]
    named = [head for module in model.modules() for head in _named_heads(module)]
    if named:
        return embeddings + named
    sizes = {module.num_embeddings for module in embeddings}
    return embeddings + [module for module in model.modules() if _output_width(module) in sizes]


def _named_heads(module: nn.Module) -> list[nn.Module]:
    listed = getattr(module, "output_head_modules", None)
    if listed is not None:
        return list(listed)
    getter = getattr(module, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return [head] if isinstance(head, nn.Module) else []


def _output_width(module: nn.Module) -> int | None:
    """Return the output features of a linear-like layer by the full shape of its weight."""
    weight = getattr(module, "weight", None)
    linear = hasattr(module, "in_features") and hasattr(module, "out_features")
    return weight.shape[0] if linear and isinstance(weight, Tensor) and weight.ndim == 2 else None
