"""Runs an update with fake tensors and notes its collectives and its memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zgcm_train.scale.measure import MemoryUse
from zgcm_train.scale.memory import COPIES, GATHERED, OTHER, LiveMemory
from zgcm_train.scale.traffic import NAMESPACES, Collective, describe

_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class Event:
    """A collective, with where in the update it fell.

    Attributes:
        collective: what was seen.
        micro_batch: forward passes begun before it.
        in_update: whether the optimizer was at work.
    """

    collective: Collective
    micro_batch: int
    in_update: bool


class StepWatch(TorchDispatchMode):
    """Answers what fake tensors cannot, and watches. Enter it inside a ``FakeTensorMode``.

    Attributes:
        events: collectives since ``begin``.
    """

    def __init__(self) -> None:
        """Watch nothing until ``begin``."""
        super().__init__()
        self.events: list[Event] = []
        self._memory = LiveMemory()
        self._phase: str | None = None
        self._micro_batch = 0
        self._kept = {"weights": 0, "state": 0, "gradients": 0, "accumulated": 0}
        self._held = 0
        self._before_backward: dict[str, int] | None = None
        self._peak = (0, "forward")

    def begin(self, model: nn.Module, optimizer: Optimizer, *, whole_gradients: bool) -> None:
        """Start with the update that comes next.

        Args:
            model: built and sharded.
            optimizer: of all its parameters.
            whole_gradients: take whole gradients for granted between micro-batches rather than look.
        """
        parameters = list(model.parameters())
        self._memory.weight_shapes.update(computed_shape(p) for p in parameters if p.ndim == 2)
        self._kept["weights"] = sum(local_bytes(p) for p in parameters)
        states = [t for state in optimizer.state.values() for t in state.values()]
        self._kept["state"] = sum(local_bytes(t) for t in states if isinstance(t, Tensor))
        self._held = sum(held_bytes(t) for t in (*parameters, *states) if isinstance(t, Tensor))
        optimizer.register_step_pre_hook(lambda *_: self._enter_update(parameters))
        model.register_forward_pre_hook(lambda *_: self._enter_micro_batch())
        if whole_gradients:
            self._kept["accumulated"] = sum(4 * computed_shape(p).numel() for p in parameters)
        self._phase = "forward"

    def memory_use(self) -> MemoryUse:
        """Return what was found."""
        kept, seen = self._kept, self._before_backward
        assert seen is not None
        return MemoryUse(
            weights=kept["weights"],
            gradients=kept["gradients"],
            optimizer_state=kept["state"],
            accumulated_gradients=kept["accumulated"],
            activations=self._others(seen),
            weight_copies=seen[COPIES],
            gathered_weights=seen[GATHERED],
            peak=self._peak[0],
            peak_phase=self._peak[1],
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if given and not any(isinstance(x, FakeTensor) for x in given):
            with unset_fake_temporarily():  # a mesh's own tensor of ranks
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._phase is not None:
            self._follow_phase()
        out = func(*args, **kwargs)
        self._memory.add(func, args, kwargs, out)
        if self._phase is None:
            self._forget_conversions(out)
            return out
        collective = describe(func, args) if func.namespace in NAMESPACES else None
        if collective is not None:
            self.events.append(Event(collective, self._micro_batch, self._phase == "update"))
        if collective is not None:
            self._look()
        else:
            self._peak = max(self._peak, (self._memory.total(), self._phase))
        return out

    def _forget_conversions(self, out: Any) -> None:
        """Drop weak references that fake tensors keep, or a module without sharding could not be materialized."""
        if isinstance(out, FakeTensor):
            out.fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()

    def _follow_phase(self) -> None:
        """Tell forward from backward: autograd says when it is at work."""
        if self._phase == "update":
            return
        phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        if phase == "backward" and self._before_backward is None:
            self._before_backward = self._look()
        if phase == "forward" and self._phase == "backward" and not self._kept["accumulated"]:
            self._kept["accumulated"] = self._others(self._look())
        self._phase = phase

    def _look(self) -> dict[str, int]:
        found = self._memory.by_kind()
        self._peak = max(self._peak, (sum(found.values()), str(self._phase)))
        return found

    def _others(self, found: dict[str, int]) -> int:
        return found[OTHER] - self._held

    def _enter_micro_batch(self) -> None:
        self._micro_batch += 1

    def _enter_update(self, parameters: Sequence[nn.Parameter]) -> None:
        self._kept["gradients"] = sum(local_bytes(p.grad) for p in parameters if p.grad is not None)
        self._phase = "update"


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of the part of a tensor that is on this rank.

    Args:
        tensor: sharded or not.
    """
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.numel() * part.element_size()


def held_bytes(tensor: Tensor) -> int:
    """Return the bytes that the part on this rank occupies, padding included.

    Args:
        tensor: sharded or not.
    """
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.untyped_storage().nbytes()


def computed_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a weight as a layer computes with it: split over tensor-parallel ranks only.

    Args:
        parameter: sharded or not.
    """
    if not isinstance(parameter, DTensor) or "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
        return parameter.shape
    axis = (parameter.device_mesh.mesh_dim_names or ()).index("tp")
    place, shape = parameter.placements[axis], list(parameter.shape)
    if place.is_shard():
        dim = int(getattr(place, "dim", 0))
        shape[dim] = -(-shape[dim] // parameter.device_mesh.size(axis))
    return torch.Size(shape)
