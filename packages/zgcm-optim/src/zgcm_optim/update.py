"""The update of matrices whose every element is at hand: plain tensors, or whole tensor-parallel shards."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from zgcm_optim.blocks import block_views
from zgcm_optim.coefficients import update_scale
from zgcm_optim.orthogonalize import Iteration, orthogonalize_each


@dataclass(frozen=True)
class Rule:
    """The numbers of one parameter group, as this step uses them.

    Args:
        lr: learning rate.
        decay: factor of the weights before the update, 1 - lr * weight_decay.
        momentum: EMA factor of the momentum.
        nesterov: whether the gradient is mixed in once more.
        scale: mode of ``update_scale``.
        extra_scale: another factor of the update.
        blocks: layout of blocks that are orthogonalized apart.
        block_dim: the dim that a whole number of blocks divides.
        iteration: how a block is orthogonalized.
    """

    lr: float
    decay: float
    momentum: float
    nesterov: bool
    scale: str
    extra_scale: float
    blocks: int | tuple[int, ...] | None
    block_dim: int
    iteration: Iteration

    @classmethod
    def of(cls, group: Mapping[str, Any], iteration: Iteration) -> "Rule":
        """Read a parameter group.

        Args:
            group: a complete, checked group.
            iteration: its iteration.

        Returns:
            The rule.
        """
        lr, blocks = float(group["lr"]), group["blocks"]
        return cls(
            lr=lr,
            decay=1.0 - lr * float(group["weight_decay"]),
            momentum=float(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            scale=group["scale"],
            extra_scale=float(group["extra_scale"]),
            blocks=blocks if blocks is None or isinstance(blocks, int) else tuple(blocks),
            block_dim=group["block_dim"],
            iteration=iteration,
        )

    def rate(self, rows: int, columns: int) -> float:
        """Return the factor of an orthogonalized block.

        Args:
            rows: rows of the block.
            columns: columns of the block.

        Returns:
            lr * scale * extra_scale.
        """
        return self.lr * update_scale(rows, columns, self.scale) * self.extra_scale


@dataclass(frozen=True)
class Matrix:
    """A matrix, or the part of one that lies on this rank, with its gradient and momentum.

    Args:
        weight: ``[rows, columns]``, updated in place.
        gradient: of the same shape.
        momentum: of the same shape, advanced in place.
        rule: the numbers of its group.
    """

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    rule: Rule

    def blocks(self) -> list["Matrix"]:
        """Return the blocks, as views ``[repetitions, rows, columns]`` of the same memory."""
        weights, gradients, momenta = (
            block_views(tensor, self.rule.blocks, self.rule.block_dim)
            for tensor in (self.weight, self.gradient, self.momentum)
        )
        return [Matrix(*parts, self.rule) for parts in zip(weights, gradients, momenta, strict=True)]

    def direction(self) -> Tensor:
        """Advance the momentum and return what is orthogonalized; call it once in a step."""
        gradient = self.gradient.to(self.momentum.dtype)
        self.momentum.lerp_(gradient, 1.0 - self.rule.momentum)
        return gradient.lerp(self.momentum, self.rule.momentum) if self.rule.nesterov else self.momentum

    def shape(self) -> tuple[int, int]:
        """Return rows and columns, repetitions joined."""
        return self.weight.shape[:-1].numel(), self.weight.shape[-1]

    def apply(self, orthogonal: Tensor) -> None:
        """Decay the weight and subtract an orthogonalized direction ``[rows, columns]``."""
        self.weight.mul_(self.rule.decay)
        self.weight.add_(orthogonal.reshape(self.weight.shape), alpha=-self.rule.rate(*self.shape()))


def update_whole(matrices: Sequence[Matrix]) -> None:
    """Update matrices in place, blocks of one shape together.

    Args:
        matrices: whole ones; a matrix without elements is left alone.
    """
    batches: dict[tuple[Any, ...], list[Matrix]] = defaultdict(list)
    for block in (block for matrix in matrices for block in matrix.blocks() if block.weight.numel()):
        rows, columns = block.shape()
        batches[min(rows, columns), max(rows, columns), block.rule.iteration, block.weight.device].append(
            block
        )
    for (_, _, iteration, _), batch in batches.items():
        sources: list[Callable[[], Tensor]] = [partial(Matrix.direction, block) for block in batch]
        for block, orthogonal in zip(batch, orthogonalize_each(sources, iteration), strict=True):
            block.apply(orthogonal)
