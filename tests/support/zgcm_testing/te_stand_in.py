"""STAND-IN for Transformer Engine, for tests on machines without a GPU. It is not Transformer Engine.

It has the parts that zgcm-model uses, under their published names, and behaves as Transformer Engine's source says for
versions 2.0 to 2.18: recipe states are made at a module's first forward pass; kernels put the maximum of what row 0 of
``amax_history`` holds and what they see there; a region that ends with gradients on rolls the history of every module
that ever ran and recomputes its scale; the first module of a region does the same for gradients in its backward pass.
Products are float32 arithmetic on quantized values.
"""

import enum
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROLLS: list[str] = []
"""Every update that the stand-in's manager made."""


class Format(enum.Enum):
    """Of transformer_engine.common.recipe."""

    E4M3 = 1
    HYBRID = 2


@dataclass
class DelayedScaling:
    """Of transformer_engine.common.recipe."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


class FP8GlobalStateManager:
    """Of transformer_engine.pytorch.quantization; of pytorch.fp8 up to 2.8."""

    recipe: Any = None
    first = False
    depth = 0
    states: dict[str, list[Any]] = {"forward": [], "backward": []}

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Say yes once for each region."""
        found, cls.first = cls.first, False
        return found

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Roll histories and compute scales of everything that ever ran."""
        which = "forward" if forward else "backward"
        ROLLS.append(which)
        for state in cls.states[which]:
            history, recipe = state.amax_history, state.recipe
            assert callable(recipe.amax_compute_algo)
            amax = recipe.amax_compute_algo(history)
            if history.shape[0] > 1:
                history.copy_(torch.roll(history, -1, 0))
            history[0].fill_(0.0)
            state.scale.copy_(
                recipe.scaling_factor_compute_algo(amax, state.scale, torch.finfo(state.dtype).max, recipe)
            )


class autocast:
    """Of transformer_engine.pytorch from 2.9 on."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
    ) -> None:
        assert enabled
        self._recipe = recipe

    def __enter__(self) -> None:
        manager = FP8GlobalStateManager
        self._before = (manager.recipe, manager.first)
        manager.recipe = self._recipe
        manager.first = manager.first or manager.depth == 0
        manager.depth += 1

    def __exit__(self, *error: Any) -> None:
        manager = FP8GlobalStateManager
        manager.recipe, manager.first = self._before
        manager.depth -= 1
        if manager.depth == 0 and torch.is_grad_enabled():
            manager.reduce_and_update_fp8_tensors(forward=True)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None
) -> autocast:
    """Of transformer_engine.pytorch up to 2.8."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


class DelayedScalingRecipeState:
    """Of transformer_engine.pytorch.quantization."""

    def __init__(self, recipe: Any, mode: str, num_quantizers: int, device: torch.device) -> None:
        self.recipe = recipe
        wide = mode == "backward" and recipe.fp8_format is Format.HYBRID
        self.dtype = torch.float8_e5m2 if wide else torch.float8_e4m3fn
        self.scale = torch.ones(num_quantizers, device=device)
        self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers, device=device)

    def quantize(self, values: torch.Tensor, column: int) -> torch.Tensor:
        """Round to FP8 and note the amax, as a kernel does."""
        with torch.no_grad():
            row = self.amax_history[0]
            row[column] = torch.maximum(row[column], values.abs().amax().float())
        limit = torch.finfo(self.dtype).max
        return (values.float() * self.scale[column]).clamp(-limit, limit).to(self.dtype).float()

    def inverse(self, column: int) -> torch.Tensor:
        """Return what undoes the scale."""
        return self.scale[column].reciprocal()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, module: Any) -> torch.Tensor:
        state, flat = module.fp8_meta["scaling_fwd"], x.flatten(0, -2)
        rows, weights = state.quantize(flat, 0), state.quantize(weight, 1)
        ctx.save_for_backward(rows, weights, state.inverse(0), state.inverse(1))
        ctx.module, ctx.shape, ctx.dtype = module, x.shape, x.dtype
        ctx.updates = torch.is_grad_enabled() and FP8GlobalStateManager.is_first_fp8_module()
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):
            out = ((rows @ weights.t()) * (state.inverse(0) * state.inverse(1))).to(dtype)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weights, inverse, weight_inverse = ctx.saved_tensors
        state, grad = ctx.module.fp8_meta["scaling_bwd"], grads[0]
        turned = state.quantize(grad.flatten(0, -2), 0)
        grad_x = ((turned @ weights) * (state.inverse(0) * weight_inverse)).to(grad.dtype).to(ctx.dtype)
        grad_weight = (turned.t() @ rows) * (state.inverse(0) * inverse)
        if ctx.updates:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return grad_x.view(ctx.shape), grad_weight, None


class Linear(nn.Module):
    """Of transformer_engine.pytorch."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: Any = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.fp8_meta: dict[str, Any] = {}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Make the recipe states when FP8 is on."""
        recipe = FP8GlobalStateManager.recipe
        assert recipe is not None, "outside a region"
        if self.fp8_meta.get("recipe") == recipe:
            return
        self.fp8_meta["recipe"] = recipe
        for key, mode, tensors in (("scaling_fwd", "forward", 3), ("scaling_bwd", "backward", 2)):
            state = DelayedScalingRecipeState(recipe, mode, num_gemms * tensors, self.weight.device)
            self.fp8_meta[key] = state
            FP8GlobalStateManager.states[mode].append(state)

    def forward(self, inp: torch.Tensor, is_first_microbatch: Any = None) -> torch.Tensor:
        """Multiply in FP8."""
        assert isinstance(inp, torch.Tensor)
        self.init_fp8_metadata()
        out: torch.Tensor = _Product.apply(inp, self.weight, self)
        return out

    def get_extra_state(self) -> torch.Tensor:
        """Return something, as Transformer Engine does."""
        return torch.ones(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Take it back."""


def install(monkeypatch: Any, *, older: bool = False) -> None:
    """Let ``import transformer_engine`` find the stand-in for one test.

    Args:
        monkeypatch: of pytest.
        older: with the names of versions up to 2.8.
    """
    ROLLS.clear()
    monkeypatch.setattr(FP8GlobalStateManager, "states", {"forward": [], "backward": []})
    home = "fp8" if older else "quantization"
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common")
    top, torch_part, common = (types.ModuleType(name) for name in names)
    manager = types.ModuleType(f"transformer_engine.pytorch.{home}")
    recipe = types.ModuleType("transformer_engine.common.recipe")
    vars(recipe).update(Format=Format, DelayedScaling=DelayedScaling)
    vars(manager).update(FP8GlobalStateManager=FP8GlobalStateManager)
    vars(torch_part).update({"Linear": Linear, home: manager})
    vars(torch_part).update({"fp8_autocast": fp8_autocast} if older else {"autocast": autocast})
    vars(top).update(pytorch=torch_part, common=common)
    vars(common).update(recipe=recipe)
    for module in (top, torch_part, manager, common, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
