"""Every architectural number of the model, checked when it is set.

The layer pattern lives here and nowhere else: layer n, counted from 1, attends globally when n is a
multiple of ``global_every``; all other layers see a window and carry an output gate.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from zgcm_model.interchange import config_json

_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "window",
    "global_every",
    "max_positions",
)


@dataclass(frozen=True)
class ModelConfig:
    """The shape and constants of a decoder.

    Args:
        vocab_size: rows of the embedding and of the output head, padding rows included.
        hidden_size: width D of the residual stream.
        intermediate_size: width of the feed-forward network.
        num_layers: number of decoder layers.
        num_heads: query heads N.
        num_kv_heads: key/value heads K; a divisor of ``num_heads``.
        head_dim: width H of one head.
        window: keys a query sees in a window layer, its own included.
        global_every: layer n, counted from 1, is global when n is a multiple of this.
        rotary_percent: share of each head that is rotated, rounded down to an even number of dims.
        rotary_base: base of the rotary frequencies.
        norm_eps: epsilon of every RMS norm.
        max_positions: longest sequence accepted.
        init_std: standard deviation of the initial weights; the two matrices that write to the residual
            stream get ``init_std / sqrt(2 * num_layers)``.
        vocab_padding: how many of the last vocabulary rows exist only to pad; they never enter a softmax.

    Raises:
        ValueError: a value is out of range or does not divide; names the field, the value and the remedy.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 128
    global_every: int = 6
    rotary_percent: float = 0.334
    rotary_base: float = 5e6
    norm_eps: float = 1e-6
    max_positions: int = 16384
    init_std: float = 0.02
    vocab_padding: int = 0

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            _require_positive_integer(name, getattr(self, name))
        for name in ("rotary_base", "norm_eps", "init_std"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "set a positive number")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"set a divisor of num_heads={self.num_heads}",
        )
        _require(
            0 < self.rotary_percent <= 1 and self.rotary_dim > 0,
            "rotary_percent",
            self.rotary_percent,
            f"set a share of at most 1 that leaves two or more of head_dim={self.head_dim} dims to rotate",
        )
        _require(
            isinstance(self.vocab_padding, int) and 0 <= self.vocab_padding < self.vocab_size,
            "vocab_padding",
            self.vocab_padding,
            f"set a number of rows from 0 to vocab_size - 1 = {self.vocab_size - 1}",
        )

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "ModelConfig":
        """Return a named configuration.

        Args:
            name: one of ``zgcm-1-7b`` (pretraining), ``zgcm-1-7b-published`` (the released files) and
                ``zgcm-1-tiny`` (the same pattern, small enough for a laptop).
            **overrides: fields that replace the preset's.

        Returns:
            The configuration.

        Raises:
            ValueError: the name or an override is unknown, or an override is out of range.

        Source: ZGCM-1 release, pretraining environment files and published config.json.
        """
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(overrides) - known):
            raise ValueError(
                f"override {unknown[0]!r} is no field of ModelConfig; choose from {sorted(known)}"
            )
        return replace(PRESETS[name], **overrides)

    @property
    def rotary_dim(self) -> int:
        """Rotated dims of each head, always even."""
        return int(self.head_dim * self.rotary_percent) // 2 * 2

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def real_vocab_size(self) -> int:
        """Vocabulary rows that take part in the softmax."""
        return self.vocab_size - self.vocab_padding

    def is_global(self, layer: int) -> bool:
        """Say whether a layer attends to everything before it.

        Args:
            layer: 0-based index of the layer.

        Returns:
            True for a global layer, False for a gated window layer.
        """
        return (layer + 1) % self.global_every == 0

    def layer_window(self, layer: int) -> int | None:
        """Return the window of a layer.

        Args:
            layer: 0-based index of the layer.

        Returns:
            The number of visible keys, or None for a global layer.
        """
        return None if self.is_global(layer) else self.window

    @property
    def num_global_layers(self) -> int:
        """Number of layers without window and gate."""
        return self.num_layers // self.global_every

    def parameter_breakdown(self) -> dict[str, int]:
        """Count the parameters of each part, without allocating any.

        Returns:
            Part names and counts; they sum to :meth:`num_parameters`.
        """
        layers, hidden = self.num_layers, self.hidden_size
        return {
            "embedding": self.vocab_size * hidden,
            "attention": layers * 2 * hidden * (self.query_size + self.kv_size),
            "gate": (layers - self.num_global_layers) * hidden * self.query_size,
            "feed_forward": layers * 3 * hidden * self.intermediate_size,
            "norm": layers * 2 * (hidden + self.head_dim) + hidden,
            "head": self.vocab_size * hidden,
        }

    def num_parameters(self) -> int:
        """Count all parameters, without allocating any.

        Returns:
            The total of :meth:`parameter_breakdown`.
        """
        return sum(self.parameter_breakdown().values())

    def to_huggingface(self) -> dict[str, Any]:
        """Return the content of the published ``config.json``.

        Returns:
            A mapping that :meth:`from_huggingface` and the ``zgcm`` class of transformers read.
        """
        return config_json.write(self, [not self.is_global(i) for i in range(self.num_layers)])

    @classmethod
    def from_huggingface(cls, config: dict[str, Any]) -> "ModelConfig":
        """Read the content of a published ``config.json``.

        Args:
            config: the parsed file.

        Returns:
            The configuration.

        Raises:
            ValueError: a key is missing, or holds a value that this architecture cannot express.
        """
        result = cls(**config_json.read(config))
        config_json.check_layers(config, result.to_huggingface())
        return result


def padded_vocab_size(real: int, tensor_parallel: int = 1, multiple: int = 128) -> int:
    """Round a vocabulary up so that it splits evenly over tensor-parallel ranks.

    Args:
        real: ids the tokenizer can produce.
        tensor_parallel: number of tensor-parallel ranks.
        multiple: rows of each rank come in multiples of this.

    Returns:
        The smallest multiple of ``multiple * tensor_parallel`` that is at least ``real``.

    Source: Megatron-LM, --make-vocab-size-divisible-by.
    """
    for name, value in (("real", real), ("tensor_parallel", tensor_parallel), ("multiple", multiple)):
        _require_positive_integer(name, value)
    step = multiple * tensor_parallel
    return -(-real // step) * step


def check_tensor_parallel(config: ModelConfig, ranks: int) -> None:
    """Refuse a number of tensor-parallel ranks over which the model does not divide.

    Args:
        config: the model's.
        ranks: tensor-parallel ranks.

    Raises:
        ValueError: names the field, both numbers and the remedy.
    """
    if ranks < 1:
        raise ValueError(f"tensor_parallel={ranks} cannot be used; set at least 1")
    for name in ("num_kv_heads", "num_heads", "intermediate_size"):
        value = getattr(config, name)
        if value % ranks:
            raise ValueError(
                f"{name}={value} does not divide over tensor_parallel={ranks}; "
                f"use a number of ranks that divides it, at most num_kv_heads={config.num_kv_heads}"
            )


def _require(condition: bool, name: str, value: object, remedy: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r} cannot be used; {remedy}")


def _require_positive_integer(name: str, value: object) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _require(whole, name, value, "set a whole number of at least 1")


PRESETS: dict[str, ModelConfig] = {
    "zgcm-1-7b": ModelConfig(154_880, 4096, 11_008, 32, 32, 8, 128),
    "zgcm-1-7b-published": ModelConfig(
        155_136, 4096, 11_008, 32, 32, 8, 128, rotary_base=1e7, max_positions=262_144
    ),
    "zgcm-1-tiny": ModelConfig(8192, 256, 688, 6, 4, 2, 64, max_positions=4096),
}
"""Configurations by name."""
