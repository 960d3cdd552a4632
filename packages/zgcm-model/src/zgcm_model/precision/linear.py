"""A linear layer whose three products run in FP8; its weight stays the float32 master."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zgcm_model.precision.scaling import ScalingState, Slot, amax


@runtime_checkable
class Products(Protocol):
    """Multiplies quantized matrices."""

    name: str

    def __call__(
        self, left: Tensor, right: Tensor, inverses: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool
    ) -> Tensor:
        """Return ``left @ right.T`` in the scale of the values before they were quantized.

        Args:
            left: FP8 [M, K], contiguous.
            right: FP8 [N, K], contiguous.
            inverses: float32 scalars, the inverse scales of left and right.
            dtype: of the result; sums are float32.
            fast: allow the device's less exact accumulation; as Transformer Engine does for forward products.

        Returns:
            [M, N].
        """
        ...


class Prepared(NamedTuple):
    """An input, quantized once for all projections that share it.

    Attributes:
        x: the input itself, for autograd; any number of leading dims.
        rows: FP8 [M, K].
        columns: FP8 [K, M] for the weight gradient; None without autograd.
        inverse: float32 scalar.
    """

    x: Tensor
    rows: Tensor
    columns: Tensor | None
    inverse: Tensor


@dataclass(frozen=True)
class Place:
    """Where a projection stands.

    Attributes:
        state: scales of the whole model.
        products: the backend.
        input: slot of the input; projections that share their input share it.
        weight: slot of the weight.
        gradient: slot of the gradient of the output.
        owners: the modules that FSDP may shard, whose weights come and go.
    """

    state: ScalingState
    products: Products
    input: Slot
    weight: Slot
    gradient: Slot
    owners: tuple[nn.Module, ...]


class _CachedWeight(NamedTuple):
    source: Tensor
    version: int
    scale_version: int
    rows: Tensor
    columns: Tensor
    largest: Tensor


class ScaledLinear(nn.Linear):
    """A projection in FP8; only ever reached by changing the class of an ``nn.Linear`` without bias."""

    def bind(self, place: Place) -> None:
        """Say where the scales are and what multiplies."""
        self._place = place
        self._cached: _CachedWeight | None = None
        self.shard_amax: Tensor | None = None

    @property
    def place(self) -> Place:
        """Slots and backend."""
        return self._place

    def prepare(self, x: Tensor) -> Prepared:
        """Quantize an input for this projection and all that share its slot.

        Args:
            x: [..., in].

        Returns:
            What ``forward`` takes in place of the input.
        """
        place, flat = self._place, x.detach().flatten(0, -2)
        if self._records():
            place.state.record(place.input, amax(flat))
        rows = place.state.quantize(flat, place.input)
        columns = transposed(rows) if torch.is_grad_enabled() else None
        return Prepared(x, rows, columns, place.state.inverse(place.input))

    def forward(self, x: Tensor | Prepared) -> Tensor:
        """Map [..., in] to [..., out].

        Args:
            x: the input, or what :meth:`prepare` made of it.

        Returns:
            The product in autocast's dtype, or in the input's without autocast.
        """
        shared = x if isinstance(x, Prepared) else self.prepare(x)
        quantized = (shared.rows, shared.columns, shared.inverse, self.quantized_weight(self.weight))
        probe = self._place.state.probe if torch.compiler.is_compiling() and self._records() else None
        out: Tensor = _Product.apply(shared.x, self.weight, probe, self, *quantized)
        return out

    def quantized_weight(self, weight: Tensor) -> Tensor:
        """Return FP8 [out, in] of this step's weight and count its amax.

        Args:
            weight: the weight at hand, whole or this rank's part.
        """
        cached, gathered = self._cache(weight), gathered_rows(weight)
        place, largest = self._place, self.shard_amax
        if cached is not None:
            largest = cached.largest
        if self._records():
            place.state.record(place.weight, amax(weight) if largest is None else largest)
        if cached is not None:
            return cached.rows
        return place.state.quantize(weight.detach(), place.weight) if gathered is None else gathered

    def quantized_columns(self, weight: Tensor) -> Tensor:
        """Return FP8 [in, out] of this step's weight."""
        cached, gathered = self._cache(weight), gathered_rows(weight)
        if cached is not None:
            return cached.columns
        if gathered is None:
            gathered = self._place.state.quantize(weight.detach(), self._place.weight)
        return transposed(gathered)

    def quantized_gradient(self, grad: Tensor, counted: bool) -> Tensor:
        """Return FP8 [M, out] of the gradient of the output, and count its amax if told to."""
        place = self._place
        if counted:
            place.state.record(place.gradient, amax(grad))
        return place.state.quantize(grad, place.gradient)

    def _records(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _cache(self, weight: Tensor) -> _CachedWeight | None:
        """Return the weight as quantized before, or now; None where its memory is FSDP's or the compiler's.

        FSDP frees and refills a weight without a trace on the tensor, and a copy would undo the sharding.
        """
        place = self._place
        if torch.compiler.is_compiling() or any(isinstance(owner, FSDPModule) for owner in place.owners):
            return None
        found, scale = self._cached, place.state.scale
        versions = (weight._version, scale._version)
        if found is None or not _same(found, weight, versions):
            rows = place.state.quantize(weight.detach(), place.weight)
            found = _CachedWeight(weight.detach(), *versions, rows, transposed(rows), amax(weight))
            self._cached = found
        return found


def _same(found: _CachedWeight, weight: Tensor, versions: tuple[int, int]) -> bool:
    # The cache keeps the memory of its source alive, so an equal address is the same memory.
    return found.source.data_ptr() == weight.data_ptr() and (found.version, found.scale_version) == versions


class _Product(torch.autograd.Function):
    """x @ W.T forward; grad @ W and grad.T @ x backward, each of two FP8 matrices."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        probe: Tensor | None,
        module: ScaledLinear,
        *tensors: Any,
    ) -> Tensor:
        place, (rows, columns, inverse, weight_rows) = module.place, tensors
        weight_inverse = place.state.inverse(place.weight)
        # Saved views of the scales: an update between forward and backward is an error, not a wrong gradient.
        ctx.save_for_backward(weight, columns, inverse, weight_inverse)
        ctx.module, ctx.dtype = module, x.dtype
        ctx.counted = module.training and probe is None
        out = place.products(rows, weight_rows, (inverse, weight_inverse), _compute_dtype(x), fast=True)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        weight, columns, inverse, weight_inverse = ctx.saved_tensors
        module: ScaledLinear = ctx.module
        products, state = module.place.products, module.place.state
        grad = grads[0]
        flat = grad.flatten(0, -2)
        rows = module.quantized_gradient(flat, ctx.counted)
        grad_inverse = state.inverse(module.place.gradient)
        grad_x = grad_weight = grad_probe = None
        if ctx.needs_input_grad[0]:
            turned = module.quantized_columns(weight)
            grad_x = products(rows, turned, (grad_inverse, weight_inverse), grad.dtype, fast=False)
            grad_x = grad_x.to(ctx.dtype).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            pair = (grad_inverse, inverse)
            grad_weight = products(transposed(rows), columns, pair, torch.float32, fast=False)
            grad_weight = grad_weight.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_probe = state.ticket(module.place.gradient, amax(flat))
        return grad_x, grad_weight, grad_probe, None, None, None, None, None


def gathered_rows(weight: Tensor) -> Tensor | None:
    """Return the FP8 values of a weight that was gathered in FP8, None for any other."""
    return getattr(weight, "rows", None)


def transposed(rows: Tensor) -> Tensor:
    """Return a contiguous transpose of an FP8 matrix."""
    # One-byte integers: not every backend copies FP8 with strides.
    return rows.view(torch.uint8).t().contiguous().view(rows.dtype)


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
