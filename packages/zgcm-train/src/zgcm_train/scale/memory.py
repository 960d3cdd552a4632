"""The bytes that are alive, by what they are for."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

GATHERED, COPIES, OTHER = "gathered", "copies", "other"


class LiveMemory:
    """Follows the storages of fake tensors from the operation that makes them to their end.

    Attributes:
        weight_shapes: shapes of whole weights on this rank; a float32 matrix of such a shape is a weight.
    """

    def __init__(self) -> None:
        """Know of nothing yet."""
        self.weight_shapes: set[torch.Size] = set()
        self._sums = {GATHERED: 0, COPIES: 0, OTHER: 0}
        self._alive: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._gathered: dict[int, weakref.ref[Any]] = {}

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Register what an operation made or filled."""
        kind = OTHER
        if func is torch.ops.aten._to_copy.default and self._is_weight_copy(args[0], out):
            kind = COPIES
        elif "split_with_sizes_copy" in func._schema.name:
            kind, out = GATHERED, (out, kwargs.get("out"))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._register(tensor.untyped_storage(), kind)

    def by_kind(self) -> dict[str, int]:
        """Return the live bytes of each kind. FSDP frees gathered weights by resizing, so those are read anew."""
        gathered = [storage() for storage in self._gathered.values()]
        self._sums[GATHERED] = sum(storage.nbytes() for storage in gathered if storage is not None)
        return dict(self._sums)

    def total(self) -> int:
        """Return all live bytes, gathered weights as ``by_kind`` last saw them."""
        return sum(self._sums.values())

    def _is_weight_copy(self, source: Tensor, out: Tensor) -> bool:
        return out.dtype != source.dtype == torch.float32 and source.shape in self.weight_shapes

    def _register(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        if key in self._alive:
            if kind != GATHERED or key in self._gathered:
                return
            self._forget(key)
        reference = weakref.ref(storage, lambda _: self._forget(key))
        if kind == GATHERED:
            self._gathered[key] = reference
        size = 0 if kind == GATHERED else storage.nbytes()
        self._alive[key] = (reference, kind, size)
        self._sums[kind] += size

    def _forget(self, key: int) -> None:
        _, kind, size = self._alive.pop(key)
        self._gathered.pop(key, None)
        self._sums[kind] -= size
