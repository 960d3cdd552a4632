"""The update of matrices whose every element is at hand: plain tensors, or whole tensor-parallel shards."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zgcm_optim.blocks import block_shapes, block_views
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

    def rates(self, shape: Sequence[int], top: int, bottom: int) -> float | list[float]:
        """Return the factors of the rows of an orthogonalized matrix.

        Args:
            shape: rows and columns of the whole matrix.
            top: first row wanted.
            bottom: one past the last.

        Returns:
            One factor where all blocks have the same, else one for each row.
        """
        shapes = block_shapes(shape, self.blocks, self.block_dim)
        each = [self.rate(*block) for block in shapes]
        if len(set(each)) == 1:
            return each[0]
        assert isinstance(self.blocks, tuple)
        pattern = [rate for rate, size in zip(each, self.blocks, strict=True) for _ in range(size)]
        return [pattern[row % len(pattern)] for row in range(top, bottom)]


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
        """Return the blocks, as views ``[repetitions, rows, columns]`` of the same memory; itself if there are none."""
        if self.rule.blocks is None:
            return [self]
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
        """Decay the weight and subtract an orthogonalized direction ``[rows, columns]`` of this matrix."""
        self.apply_part(orthogonal.reshape(self.weight.shape), self.rule.rate(*self.shape()))

    def apply_part(self, orthogonal: Tensor, rates: float | list[float]) -> None:
        """Decay the weight and subtract a direction of its shape, times one factor or one for each row."""
        self.weight.mul_(self.rule.decay)
        if isinstance(rates, float):
            self.weight.add_(orthogonal, alpha=-rates)
        else:
            column = self.weight.new_tensor(rates).unsqueeze(1)
            self.weight.addcmul_(orthogonal.to(self.weight.dtype), column, value=-1.0)


@dataclass(frozen=True)
class Task:
    """One matrix to orthogonalize.

    Args:
        shape: short and long side.
        iteration: how.
        device: where.
        source: returns the matrix, ``[rows, columns]`` or ``[repetitions, rows, columns]``.
        sink: takes the result ``[rows, columns]``.
    """

    shape: tuple[int, int]
    iteration: Iteration
    device: torch.device
    source: Callable[[], Tensor]
    sink: Callable[[Tensor], None]

    @classmethod
    def of(cls, block: Matrix) -> "Task":
        """Read the direction of a block and update it."""
        short, long = sorted(block.shape())
        return cls((short, long), block.rule.iteration, block.weight.device, block.direction, block.apply)

    @classmethod
    def between(cls, view: Tensor, target: Tensor, iteration: Iteration) -> "Task":
        """Read one view ``[repetitions, rows, columns]`` and write another."""
        short, long = sorted((view.shape[0] * view.shape[1], view.shape[2]))
        sink = partial(_write, target)
        return cls((short, long), iteration, view.device, partial(torch.Tensor.detach, view), sink)


def _write(target: Tensor, result: Tensor) -> None:
    target.copy_(result.reshape(target.shape))


def run_tasks(tasks: Sequence[Task]) -> None:
    """Orthogonalize matrices, those of one shape together.

    Args:
        tasks: in any order; each is read when its batch begins and written when it ends.
    """
    batches: dict[tuple[Any, ...], list[Task]] = defaultdict(list)
    for task in tasks:
        batches[task.shape, task.iteration, task.device].append(task)
    for batch in batches.values():
        sources = [task.source for task in batch]
        for task, result in zip(batch, orthogonalize_each(sources, batch[0].iteration), strict=True):
            task.sink(result)


def update_whole(matrices: Sequence[Matrix]) -> None:
    """Update matrices in place, blocks of one shape together.

    Args:
        matrices: whole ones; a matrix without elements is left alone.
    """
    blocks = [block for matrix in matrices for block in matrix.blocks()]
    run_tasks([Task.of(block) for block in blocks if block.weight.numel()])
