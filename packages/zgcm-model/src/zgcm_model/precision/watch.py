"""Numbers about numbers: how FP8 tensors fit their scales and how far layer outputs reach, sampled now and then.

    watch = NumericsWatch(decoder, every=100)
    with watch.sample(step) as sample:
        loss_of_the_first_micro_batch.backward()          # and its forward pass
    for record in sample.records():                       # empty unless the step is a multiple of 100
        write(record)

Every record is a dict of strings, numbers, booleans and None, ready for a JSON line. The values of the passes that are
watched stay as they are, bit for bit.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zgcm_model.decoder import Decoder
from zgcm_model.precision.injection import is_applied, scaling_state
from zgcm_model.precision.recipe import FORWARD
from zgcm_model.precision.scaling import ScalingState
from zgcm_model.precision.transformer_engine import TransformerEngineState

Record = dict[str, Any]

DEFAULT_EVERY = 100
"""Steps between samples."""
DEFAULT_THRESHOLD = 1e-3
"""Share of saturated elements that makes an event. Chosen here: no published value is known."""
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class _Seen(NamedTuple):
    """What was counted of a tensor; everything stays on its device until the records are read.

    Attributes:
        largest: float64 [2]: amax, and scale (1 for the output of a layer).
        sums: float64: for FP8 [4] all elements, saturated, flushed and non-finite ones; for the output of a layer
            [5] the sums of its elements' powers from 0 to 4.
        format: of an FP8 tensor; empty for the output of a layer.
    """

    largest: Tensor
    sums: Tensor
    format: str


class NumericsSample:
    """What one sample saw.

    Args:
        step: it was taken in.
        threshold: share of saturated elements above which a tensor makes an event.
    """

    def __init__(self, step: int, threshold: float) -> None:
        self._step, self._threshold = step, threshold
        self._seen: dict[str, _Seen] = {}

    def records(self, group: ProcessGroup | None = None) -> list[Record]:
        """Return what was seen, and an event for every tensor that saturates; waits for the device.

        FP8 tensors: ``{"kind": "fp8", "step", "name", "layer", "format", "amax", "scale", "saturated", "flushed",
        "elements", "finite"}``; ``saturated`` is the share of elements that rounding would have taken past the
        largest FP8 value, ``flushed`` that of elements that became zero without being zero. Of compiled layers only
        amax and scale are known, and ``saturated``, ``flushed`` and ``elements`` are None.
        Layer outputs: ``{"kind": "block", "step", "name", "layer", "amax", "kurtosis", "elements", "finite"}``; a
        normal distribution has kurtosis 3.
        Events: ``{"kind": "event", "event": "fp8_saturation", "step", "message", "name", "layer", "saturated",
        "threshold"}``.

        Args:
            group: ranks that saw the same tensors or other parts of them, such as the replicas of a pipeline stage:
                counts add up, amaxes are the largest. Every rank of it must call. None for this rank alone.

        Returns:
            Records in the order in which tensors were first seen; empty when the step was not sampled.
        """
        if not self._seen:
            return []
        names = sorted(self._seen) if group is not None else list(self._seen)
        largest = torch.stack([self._seen[name].largest for name in names])
        sums = torch.cat([self._seen[name].sums for name in names])
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            dist.all_reduce(sums, group=group)
        counts = iter(sums.tolist())
        found = []
        for name, (amax, scale) in zip(names, largest.tolist(), strict=True):
            seen = self._seen[name]
            mine = [next(counts) for _ in range(seen.sums.numel())]
            common = {"step": self._step, "name": name, "layer": int(name.split(".")[1])}
            figures = _fp8_figures(seen.format, scale, mine) if seen.format else _block_figures(mine)
            found.append({"kind": figures.pop("kind")} | common | {"amax": _finite(amax)} | figures)
        return found + [self._event(record) for record in found if self._saturates(record)]

    def tensor(self, name: str, values: Tensor, rounded: Tensor, scale: Tensor) -> None:
        """Count a tensor that is quantized; the observer of the FP8 state.

        Args:
            name: of the tensor.
            values: before it was scaled and rounded.
            rounded: FP8, of the same shape.
            scale: float32 scalar.
        """
        magnitude = values.detach().abs().float()
        lost = magnitude * scale >= rounds_past(rounded.dtype)
        finite = magnitude.isfinite()
        flushed = (rounded.float() == 0) & (magnitude > 0)
        largest = torch.where(finite, magnitude, 0.0).amax() if magnitude.numel() else magnitude.sum()
        counts = [magnitude.new_full((), magnitude.numel(), dtype=torch.float64)]
        counts += [mask.sum(dtype=torch.float64) for mask in (lost & finite, flushed & finite, ~finite)]
        self._add(
            name,
            _Seen(
                torch.stack((largest, scale.float())).double(), torch.stack(counts), _FORMATS[rounded.dtype]
            ),
        )

    def block(self, layer: int, output: Tensor) -> None:
        """Count the output of a layer.

        Args:
            layer: its 0-based index.
            output: residual stream [B, T, D] after it.
        """
        x = output.detach().float()
        square = x * x
        # Sums of powers, not of distances from the mean: those of ranks and micro-batches add up.
        sums = [
            part.sum(dtype=torch.float64)
            for part in (torch.ones_like(x), x, square, square * x, square * square)
        ]
        largest = x.abs().amax() if x.numel() else x.sum()
        self._add(
            f"layers.{layer}",
            _Seen(torch.stack((largest, torch.ones_like(largest))).double(), torch.stack(sums), ""),
        )

    @torch.no_grad()
    def state(self, state: ScalingState) -> None:
        """Take amaxes and scales from the FP8 state, for layers into which nothing can look.

        Args:
            state: before its update.
        """
        state.collect()
        amaxes = torch.where(state.pending < 0, torch.nan, state.pending)
        columns = torch.stack((amaxes, state.scale), dim=1).double()
        unknown = columns.new_full((4,), torch.nan)
        for name, column in zip(state.names, columns, strict=True):
            dtype = state.recipe.gradient_dtype if name.endswith(".gradient") else FORWARD
            self._seen[name] = _Seen(column, unknown, _FORMATS[dtype])

    def _add(self, name: str, new: _Seen) -> None:
        old = self._seen.get(name)
        if old is not None:
            new = _Seen(torch.maximum(old.largest, new.largest), old.sums + new.sums, new.format)
        self._seen[name] = new

    def _saturates(self, record: Record) -> bool:
        return record["kind"] == "fp8" and (record["saturated"] or 0.0) > self._threshold

    def _event(self, record: Record) -> Record:
        share, name = record["saturated"], record["name"]
        message = (
            f"{share:.2%} of {name} are past the largest {record['format']} value at scale {record['scale']:.4g}, "
            f"{self._threshold:.2%} are allowed; its amax is {record['amax']:.4g}"
        )
        event = {"kind": "event", "event": "fp8_saturation", "step": self._step, "message": message}
        return event | {
            "name": name,
            "layer": record["layer"],
            "saturated": share,
            "threshold": self._threshold,
        }


class NumericsWatch:
    """Samples the numerics of a decoder every so many steps; between samples it costs nothing.

    Args:
        decoder: with or without FP8; sharded or not.
        every: steps between samples.
        saturation_threshold: share of saturated elements above which a tensor makes an event.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        every: int = DEFAULT_EVERY,
        saturation_threshold: float = DEFAULT_THRESHOLD,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} cannot be used; set at least 1 step")
        if not 0 <= saturation_threshold <= 1:
            raise ValueError(f"saturation_threshold={saturation_threshold} is no share; set 0 to 1")
        self._decoder, self._every, self._threshold = decoder, every, saturation_threshold

    def due(self, step: int) -> bool:
        """Say whether a step is sampled."""
        return step % self._every == 0

    @contextmanager
    def sample(self, step: int) -> Iterator[NumericsSample]:
        """Watch the passes inside the block if the step is due.

        Put the first micro-batch of an update inside, forward and backward: weights are quantized there and then
        kept for the others.

        Args:
            step: number of the update.

        Yields:
            The sample, filled when the passes have run; its records are empty if the step is not due.
        """
        sample = NumericsSample(step, self._threshold)
        state = scaling_state(self._decoder) if is_applied(self._decoder) else None
        if not self.due(step):
            yield sample
        elif _is_compiled(self._decoder):
            # Hooks would be passed over, and an observer would compile everything anew.
            yield sample
            if state is not None:
                sample.state(state)
        else:
            with _watching(self._decoder, state, sample):
                yield sample
            if isinstance(state, TransformerEngineState):
                # Its tensors are quantized where no observer sees them.
                sample.state(state)


@contextmanager
def _watching(decoder: Decoder, state: ScalingState | None, sample: NumericsSample) -> Iterator[None]:
    # By name: a pipeline stage holds some layers, under their numbers in the whole model.
    handles = [
        block.register_forward_hook(_Reader(sample, int(name)))
        for name, block in decoder.layers.named_children()
    ]
    if state is not None:
        state.observer = sample.tensor
    try:
        yield
    finally:
        if state is not None:
            state.observer = None
        for handle in handles:
            handle.remove()


class _Reader:
    """A forward hook that shows a sample the output of one layer."""

    def __init__(self, sample: NumericsSample, layer: int) -> None:
        self._sample, self._layer = sample, layer

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._sample.block(self._layer, output)


def rounds_past(dtype: torch.dtype) -> float:
    """Return the scaled magnitude from which rounding to nearest would leave an FP8 format.

    Args:
        dtype: E4M3 or E5M2.

    Returns:
        The largest value and half the distance to what would be the next one.
    """
    found = torch.finfo(dtype)
    exponent = torch.tensor(found.max).log2().floor().item()
    return float(found.max + 2.0**exponent * found.eps / 2)


def _fp8_figures(kind: str, scale: float, counts: list[float]) -> Record:
    elements, saturated, flushed, broken = counts
    known = not math.isnan(elements)
    total = max(elements, 1.0)
    return {
        "kind": "fp8",
        "format": kind,
        "scale": scale,
        "saturated": saturated / total if known else None,
        "flushed": flushed / total if known else None,
        "elements": int(elements) if known else None,
        "finite": broken == 0 if known else None,
    }


def _block_figures(sums: list[float]) -> Record:
    return {
        "kind": "block",
        "kurtosis": kurtosis(sums),
        "elements": int(sums[0]),
        "finite": math.isfinite(sums[4]),
    }


def kurtosis(sums: list[float]) -> float | None:
    """Return the fourth moment about the mean over the squared second; 3 for a normal distribution.

    Args:
        sums: of the powers 0 to 4 of the elements.

    Returns:
        The kurtosis; None where it is not defined: no elements, equal ones, or non-finite ones.
    """
    count = sums[0]
    if count == 0 or not math.isfinite(sums[4]):
        return None
    mean, second, third, fourth = (value / count for value in sums[1:])
    variance = second - mean**2
    if variance <= 1e-12 * second:
        return None
    return (fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4) / variance**2


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_compiled(decoder: Decoder) -> bool:
    """Say whether the decoder or a layer was compiled in place."""
    return any(module._compiled_call_impl is not None for module in (decoder, *decoder.blocks()))
