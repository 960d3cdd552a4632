"""What is measured: the command line, the model, and how many layers fit."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zgcm_model import ModelConfig

PRECISIONS = ("bf16", "fp8-scaled_mm", "fp8-te")
MODES = ("compiled", "eager")
ORDER = (
    "bf16 compiled",
    "fp8-scaled_mm compiled",
    "bf16 eager",
    "fp8-scaled_mm eager",
    "fp8-te compiled",
    "fp8-te eager",
)
"""The variants, most telling first, since the last ones fall to the budget."""
ACCUMULATION = 8
"""Micro-batches per update in the ZGCM-1 run."""
LAYER_CHOICES = (32, 26, 19, 13, 6)
"""Numbers of layers whose window:global ratio is nearest to the recipe's 27:5."""
TOY = ModelConfig(512, 64, 96, 2, 4, 2, 16, window=8, global_every=2, max_positions=64)
"""A window layer and a global one."""

_STATE_BYTES = 6
"""Per parameter of a layer: weight, gradient and momentum in bfloat16."""
_COPY_BYTES = {"compiled": 0, "eager": 2}
"""Per parameter of a layer: FP8 copies in two layouts, which a compiled layer makes anew each time."""
_SAVED_WIDTHS = {"compiled": 15.0, "eager": 22.5}
"""Values kept for the backward pass per token and layer, in units of the hidden size, of a full-width layer."""
_USABLE = 0.9


@dataclass(frozen=True)
class Settings:
    """What the command line asks for.

    Attributes:
        device: ``cuda`` or ``cpu``.
        toy: a model of a few thousand parameters in place of the full width.
        layers: of the stack; 0 picks what fits.
        rows: sequences per micro-batch.
        steps: timed micro-batches.
        chunk: tokens whose logits exist at the same time.
        variants: names of ``ORDER``.
        backend: of ``torch.compile``.
        budget_seconds: no variant starts that would overrun this.
        deadline_seconds: the watchdog ends the process here.
        json: file for JSON lines, or None.
    """

    device: str = "cuda"
    toy: bool = False
    layers: int = 0
    rows: int = 1
    steps: int = 4
    chunk: int = 4096
    variants: tuple[str, ...] = ORDER
    backend: str = "inductor"
    budget_seconds: float = 200.0
    deadline_seconds: float = 230.0
    json: Path | None = None

    @property
    def length(self) -> int:
        """Positions per row."""
        return TOY.max_positions if self.toy else 16384

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.rows * self.length

    def config(self, mode: str, memory: float) -> ModelConfig:
        """Return the stack's model.

        Args:
            mode: ``compiled`` or ``eager``; eager layers keep more for the backward pass.
            memory: bytes of the device.
        """
        if self.toy:
            return TOY if self.layers == 0 else replace(TOY, num_layers=self.layers)
        full = ModelConfig.preset("zgcm-1-7b")
        return replace(full, num_layers=self.layers or layers_that_fit(full, self, mode, memory))


def layers_that_fit(config: ModelConfig, settings: Settings, mode: str, memory: float) -> int:
    """Return the largest of ``LAYER_CHOICES`` whose estimated memory fits.

    Args:
        config: of the full model.
        settings: rows and chunk.
        mode: ``compiled`` or ``eager``.
        memory: bytes of the device.

    Returns:
        A number of layers; the smallest choice where none fits.
    """
    counts = config.parameter_breakdown()
    per_layer = (counts["attention"] + counts["gate"] + counts["feed_forward"]) / config.num_layers
    saved = 2 * _SAVED_WIDTHS[mode] * config.hidden_size * settings.tokens
    layer = (_STATE_BYTES + _COPY_BYTES[mode]) * per_layer + saved
    tables = 8 * (counts["embedding"] + counts["head"])
    head = 10 * counts["head"] + 10 * settings.chunk * config.vocab_size
    for layers in LAYER_CHOICES:
        if layers * layer + tables + head <= _USABLE * memory:
            return layers
    return LAYER_CHOICES[-1]


def fewer_layers(layers: int) -> int | None:
    """Return the next smaller of ``LAYER_CHOICES``; None for the smallest."""
    return max((choice for choice in LAYER_CHOICES if choice < layers), default=None)


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line.

    Args:
        arguments: without the program's name; those of the process when left out.

    Returns:
        The settings.
    """
    parser = argparse.ArgumentParser(
        prog="layer_stack.py",
        description="Speed of full-width ZGCM-1 layers on one GPU, in BF16 and FP8, compiled and eager.",
    )
    default = Settings()
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default.device)
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script without a GPU")
    parser.add_argument("--layers", type=int, default=0, help="default: the most that fit, near 27:5")
    parser.add_argument("--rows", type=int, default=default.rows, help="sequences per micro-batch")
    parser.add_argument("--steps", type=int, default=default.steps, help="timed micro-batches")
    parser.add_argument("--chunk", type=int, default=default.chunk, help="tokens per piece of the head")
    parser.add_argument("--variants", nargs="+", choices=ORDER, default=ORDER, metavar="VARIANT")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--budget-seconds", type=float, default=default.budget_seconds)
    parser.add_argument("--deadline-seconds", type=float, default=None, help="default: budget + 30")
    parser.add_argument("--json", type=Path, default=None, help="also write one JSON line per result")
    options = vars(parser.parse_args(arguments))
    if options["deadline_seconds"] is None:
        options["deadline_seconds"] = options["budget_seconds"] + 30
    options["variants"] = tuple(options["variants"])
    return Settings(**options)
