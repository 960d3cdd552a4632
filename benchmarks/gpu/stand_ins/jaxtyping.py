"""Shapes in annotations without checking them: ``Float[Tensor, "batch time"]`` is ``Tensor``."""

from typing import Any


class _Unchecked:
    def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
        return item[0]


Bool = Float = Int = Shaped = _Unchecked
