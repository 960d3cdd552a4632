"""What every attention kernel promises, and the documents it must keep apart."""

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar, cast, runtime_checkable

from torch import Tensor

T = TypeVar("T")


class Documents:
    """Which document each query and each key belongs to, with what kernels derive from it.

    One object lives for one forward pass, so a mask built in the first layer serves all layers like it.

    Args:
        query_ids: int [B, Tq], document of each query.
        key_ids: int [B, Tk], document of each key; ``query_ids`` when left out.
    """

    def __init__(self, query_ids: Tensor, key_ids: Tensor | None = None) -> None:
        self.query_ids = query_ids
        self.key_ids = query_ids if key_ids is None else key_ids
        self._derived: dict[Hashable, object] = {}

    def keys(self, length: int) -> Tensor:
        """Return the ids of the last ``length`` keys, for a layer that has forgotten the others."""
        return self.key_ids[:, self.key_ids.shape[1] - length :]

    def derive(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return what ``build`` makes, made once per key.

        Args:
            key: names the derived object; the same key must always mean the same ``build``.
            build: makes it.

        Returns:
            The object.
        """
        if key not in self._derived:
            self._derived[key] = build()
        return cast(T, self._derived[key])


@runtime_checkable
class AttentionKernel(Protocol):
    """Causal grouped-query attention with an optional window and optional documents.

    Queries are aligned with the end of the keys: query i of Tq stands at key position Tk - Tq + i, called p.
    Key j is visible when ``j <= p``, when ``p - j < window`` if there is a window, and when both belong to
    the same document if documents are given. Scores are scaled by ``H ** -0.5``.
    """

    name: str

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, documents: Documents | None
    ) -> Tensor:
        """Attend.

        Args:
            query: [B, Tq, N, H].
            key: [B, Tk, K, H] with Tk >= Tq; query head n reads key head ``n // (N // K)``.
            value: [B, Tk, K, H].
            window: visible keys per query, its own included; None for all.
            documents: [B, Tq] and [B, Tk] ids, or None when everything is one document.

        Returns:
            [B, Tq, N, H] in the dtype of ``query``.
        """
        ...
