"""Build the stack of one variant: layers in a precision, compiled or eager, with head, loss and optimizer.

Weights are bfloat16, as FSDP2 hands them to the layers, and drawn on the device. A compiled variant compiles layer by
layer: two programs, one for window layers and one for global ones, serve the whole stack. At 16,384 tokens a kernel
runs for tens of microseconds at least, so launches hide behind kernels and CUDA graphs would gain nothing.
"""

import importlib.util
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stack.settings import ACCUMULATION, Settings
from zgcm_model import Decoder, ModelConfig, chunked_lm_terms, precision
from zgcm_model.kernels import make_kernel
from zgcm_model.kernels.flex import FlexKernel
from zgcm_model.precision.linear import ScaledLinear
from zgcm_optim import Muon, clip_grad_norm_, presets

_BACKENDS = {"fp8-scaled_mm": "scaled_mm", "fp8-te": "transformer_engine"}
_COMPILES_SCALED_MM = (2, 13)
"""From this version of torch on, layers with ``torch.nn.functional.scaled_mm`` can be compiled and run on a CPU."""


class PrimedFlexKernel(FlexKernel):
    """FlexAttention whose masks exist before layers are compiled, so that no layer compiles their making."""

    def prime(self, config: ModelConfig, length: int, device: str) -> None:
        """Make the masks of window and global layers."""
        like = torch.empty(1, length, 1, 1, device=device)
        for window in (config.window, None):
            self._mask(like, like, window, None)


class OlderProducts:
    """FP8 products by the call that older versions of torch compile; sizes must be multiples of 16."""

    name = "scaled_mm"

    def __call__(
        self, left: Tensor, right: Tensor, inverses: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool
    ) -> Tensor:
        """Return ``left @ right.T`` of FP8 matrices, times both inverse scales."""
        return torch._scaled_mm(
            left, right.t(), scale_a=inverses[0], scale_b=inverses[1], out_dtype=dtype, use_fast_accum=fast
        )


@dataclass
class Stack:
    """One variant, ready to run.

    Attributes:
        decoder: layers, embedding and head.
        optimizer: Muon and Adam.
        settings: sizes.
        token_ids: int64 [B, T + 1].
        mask: bool [B, T], all True.
    """

    decoder: Decoder
    optimizer: Muon
    settings: Settings
    token_ids: Tensor
    mask: Tensor

    def micro_batch(self) -> Tensor:
        """Add the gradient of one micro-batch and return its mean loss."""
        hidden = self.decoder(self.token_ids[:, :-1])
        loss = self.loss(hidden)
        (loss / ACCUMULATION).backward()
        return loss.detach()

    def loss(self, hidden: Tensor) -> Tensor:
        """Return the mean loss of the final hidden states."""
        weight = self.decoder.lm_head.weight
        total, count = chunked_lm_terms(hidden, weight, self.token_ids[:, 1:], self.mask, self.settings.chunk)
        return total / count

    def update(self) -> None:
        """Clip, step and move the FP8 scales on; the gradients stay."""
        clip_grad_norm_(self.decoder.parameters(), 1.0)
        self.optimizer.step()
        if precision.is_applied(self.decoder):
            precision.update_scales(self.decoder)


def missing_part(name: str, device: str) -> str | None:
    """Say why a precision cannot be measured here; None where it can.

    Args:
        name: of ``PRECISIONS``.
        device: ``cuda`` or ``cpu``.
    """
    if name == "fp8-te" and importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    if name != "bf16" and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return "this GPU has no FP8 units"
    return None


def build_stack(config: ModelConfig, settings: Settings, name: str, mode: str) -> Stack:
    """Build one variant.

    Args:
        config: its model.
        settings: sizes and device.
        name: the precision.
        mode: ``compiled``, ``eager``, or ``compiled apart``: attention is compiled by itself, outside the layer.

    Returns:
        The stack, in training mode.
    """
    torch.manual_seed(0)
    kernel = PrimedFlexKernel() if settings.device == "cuda" else make_kernel("banded")
    with torch.device("meta"):
        decoder = Decoder(config, kernel=kernel).to(torch.bfloat16)
    decoder = draw(decoder.to_empty(device=settings.device)).train()
    if name != "bf16":
        use_fp8(decoder, _BACKENDS[name])
    if isinstance(kernel, PrimedFlexKernel):
        kernel.prime(config, settings.length, settings.device)
    if mode != "eager":
        compile_layers(decoder, settings.backend, attention_apart=mode == "compiled apart")
    ids = torch.randint(0, config.vocab_size, (settings.rows, settings.length + 1), device=settings.device)
    mask = torch.ones(settings.rows, settings.length, dtype=torch.bool, device=settings.device)
    return Stack(decoder, presets.zgcm1(decoder), settings, ids, mask)


@torch.no_grad()
def draw(decoder: Decoder) -> Decoder:
    """Fill the weights on their device: matrices normal, norm scales 1.

    ``zgcm_model.initialize`` draws on the processor, which takes minutes at this size.
    """
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, decoder.config.init_std)
        else:
            parameter.fill_(1.0)
    return decoder


def use_fp8(decoder: Decoder, backend: str) -> None:
    """Compute the projections in FP8 with the run's delayed scaling.

    Args:
        decoder: the model.
        backend: of ``precision.apply``.
    """
    precision.apply(decoder, precision.DelayedScaling(), backend=backend)
    if backend == "scaled_mm" and torch_version() < _COMPILES_SCALED_MM:
        for module in decoder.modules():
            if isinstance(module, ScaledLinear):
                module.bind(replace(module.place, products=OlderProducts()))


def torch_version() -> tuple[int, int]:
    """Return major and minor version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def compile_layers(decoder: Decoder, backend: str, *, attention_apart: bool) -> None:
    """Compile every layer and the final norm in place.

    Args:
        decoder: the model.
        backend: of ``torch.compile``.
        attention_apart: leave the attention core out of the layers' programs.
    """
    # FP8 layers know their place in the common state by its column; as a constant it would give each layer a
    # program of its own.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    torch.compiler.config.dynamic_sources = r".*column"
    for block in decoder.blocks():
        if attention_apart:
            block.attention.kernel = torch.compiler.disable(block.attention.kernel)
        block.compile(backend=backend)
    decoder.norm.compile(backend=backend)
