"""The sections of a recipe, each a frozen pydantic model that is closed to unknown keys."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from zgcm_model import ModelConfig
from zgcm_model.precision import DelayedScaling, HighPrecision
from zgcm_train.spikes import SpikeAction, SpikePolicy

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Role = Literal["q", "k", "v", "g", "o", "gate", "up", "down"]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A part of the recipe: frozen, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """Who the run is: its name and the seed of its initial weights."""

    name: str = "zgcm"
    seed: Count = 6198


class ModelSection(Section):
    """The architecture: a preset of zgcm-model and what differs from it."""

    preset: str = "zgcm-1-7b"
    vocab_size: PositiveInt | None = None
    hidden_size: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    num_layers: PositiveInt | None = None
    num_heads: PositiveInt | None = None
    num_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rotary_base: PositiveFloat | None = None
    max_positions: PositiveInt | None = None
    kernel: str = "auto"
    compile: bool = False  # each layer through torch.compile

    def architecture(self) -> ModelConfig:
        """Return the model configuration that this section describes.

        Raises:
            ValueError: the preset is unknown or the sizes do not fit together.
        """
        changed = self.model_dump(exclude={"preset", "kernel", "compile"}, exclude_none=True)
        return ModelConfig.preset(self.preset, **changed)


class OptimizerSection(Section):
    """Muon for matrices and Adam for the rest; names as in ``zgcm_optim.Muon``."""

    lr: NonNegative = 2e-4
    weight_decay: NonNegative = 0.1
    momentum: Fraction = 0.9
    nesterov: bool = False
    steps: PositiveInt = 5
    coefficients: Literal["quintic", "simple", "polar_express", "deepseek_v4"] = "quintic"
    scale: Literal["spectral", "match_rms_adamw", "shape", "unit_rms", "none"] = "spectral"
    extra_scale: PositiveFloat = 1.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    sharded: Literal["exact", "blockwise"] = "exact"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    clip_norm: NonNegative = 1.0  # global gradient norm that an update may have; 0 turns clipping off
    max_skipped: Count = 3  # updates in a row that may be left out because they are not finite or spikes
    spike_factor: NonNegative = (
        0.0  # a loss above this times the median of recent ones is a spike; 0: none is
    )
    spike_window: PositiveInt = 64  # updates whose losses are the recent ones
    spike_action: SpikeAction = (
        "record"  # or leave the update out ("skip"), or end the run before it ("stop")
    )

    def spikes(self) -> SpikePolicy:
        """Return what is done about loss spikes."""
        return SpikePolicy(self.spike_factor, self.spike_window, self.spike_action)

    @model_validator(mode="after")
    def _meaningful_factor(self) -> Self:
        if 0 < self.spike_factor <= 1:
            raise ValueError(
                f"optimizer.spike_factor {self.spike_factor} would call half of all losses spikes; use more than 1, "
                "such as 2, or 0 for none"
            )
        return self


class ScheduleSection(Section):
    """The learning rate as a function of the update number."""

    kind: Literal["constant", "cosine", "warmup_stable_decay"] = "constant"
    warmup_updates: Count = 0
    decay_updates: Count = 0
    min_lr: NonNegative = 0.0

    @model_validator(mode="after")
    def _no_inert_setting(self) -> Self:
        if self.kind == "constant" and (self.decay_updates or self.min_lr):
            raise ValueError(
                "schedule.decay_updates and schedule.min_lr have no effect when schedule.kind is "
                '"constant"; remove them or choose "cosine" or "warmup_stable_decay"'
            )
        if self.kind == "warmup_stable_decay" and not self.decay_updates:
            raise ValueError('schedule.kind "warmup_stable_decay" needs schedule.decay_updates above 0')
        return self


class PrecisionSection(Section):
    """Weights and optimizer state are float32; the types of compute and of gradients on the wire are chosen here."""

    compute: Literal["float32", "bfloat16"] = "float32"
    reduce: Literal["float32", "bfloat16"] = "float32"  # gradients on the wire; their sums stay float32
    # FP8 projections with delayed scaling; names as in ``zgcm_model.precision.DelayedScaling``
    fp8: Literal["off", "hybrid", "e4m3"] = "off"
    amax_history_len: PositiveInt = 1024
    amax_compute: Literal["max", "most_recent"] = "max"
    margin: Count = 0
    backend: Literal["auto", "reference", "scaled_mm", "transformer_engine"] = "auto"
    # projections that are not computed in FP8: in every layer, and in some; negative numbers count from the last
    high_precision: tuple[Role, ...] = ()
    high_precision_layers: dict[Role, tuple[int, ...]] = {}
    gather: Literal["float32", "fp8"] = "float32"  # weights on the wire when FSDP gathers them
    # Penalty on extreme layer outputs (TWEO, arXiv:2511.23225), added to the loss that is learned from, not to the one
    # that is shown; 0.01 is published, 0 is off
    tweo_weight: NonNegative = 0.0
    tweo_tau: PositiveFloat = 3.0
    tweo_power: Annotated[float, Field(ge=1.0)] = 4.0
    # go on from a checkpoint that was made with FP8 on when it is off now, or the reverse
    allow_switch: bool = False

    def scaling(self) -> DelayedScaling | None:
        """Return the FP8 recipe, or None when FP8 is off."""
        if self.fp8 == "off":
            return None
        return DelayedScaling(self.fp8, self.amax_history_len, self.amax_compute, self.margin)

    def table(self) -> HighPrecision:
        """Return what stays in high precision."""
        return HighPrecision(self.high_precision, self.high_precision_layers)

    @model_validator(mode="after")
    def _no_inert_setting(self) -> Self:
        free = {"compute", "reduce", "fp8", "allow_switch", "tweo_weight", "tweo_tau", "tweo_power"}
        fields = type(self).model_fields
        inert = [name for name in fields if name not in free and getattr(self, name) != fields[name].default]
        if self.fp8 == "off" and inert:
            raise ValueError(
                f'precision.{inert[0]} has no effect when precision.fp8 is "off"; remove it or set fp8'
            )
        return self


class ParallelSection(Section):
    """Sizes of the mesh axes, whose product is the number of devices, and what saves memory on each."""

    dp_replicate: PositiveInt = 1
    dp_shard: PositiveInt = 1
    cp: PositiveInt = 1
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    sequence_parallel: bool = True  # split the residual stream over the tensor-parallel ranks
    recompute: Literal["none", "selective", "full"] = "none"
    hang_timeout: NonNegative = (
        1800.0  # seconds in one phase of an update that end a run of many ranks; 0: never
    )
    # Seconds for all ranks to come, and again for all to join the process group.
    meet_timeout: PositiveFloat = 600.0
    # "last" holds a whole float32 gradient per device until the update's last micro-batch; "every" holds a shard.
    gradient_sync: Literal["last", "every"] = "last"
    prefetch: Count = 1  # layers whose weights FSDP gathers ahead of their use
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"

    @property
    def devices(self) -> int:
        """Number of devices of the whole mesh."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def data_parallel(self) -> int:
        """Number of replicas that read different rows."""
        return self.dp_replicate * self.dp_shard


class DataSection(Section):
    """How rows become batches; sizes are in rows of ``sequence_length`` positions."""

    sequence_length: PositiveInt = 16384
    global_batch: PositiveInt = 768
    micro_batch: PositiveInt = 2
    backend: Literal["auto", "python", "dali"] = "auto"
    cross_document_attention: bool = True
    # What a Megatron dataset does not say itself where it has no file PREFIX.zgcm.json beside it
    megatron_vocab_size: PositiveInt | None = None
    megatron_eos_id: Count | None = None
    megatron_tokenizer_sha256: str | None = None


class CheckpointSection(Section):
    """When to save, and how many saves of one stage to keep beside its last."""

    interval: PositiveInt = 1000
    keep: PositiveInt = 2
    asynchronous: bool = False  # copy to memory, then write while training goes on


class LogSection(Section):
    """How often the console, ``metrics.jsonl`` and TensorBoard get a line."""

    interval: PositiveInt = 10
    tensorboard: bool = True
    wandb: str | None = None  # project of Weights & Biases; needs the extra "wandb"
    profile: tuple[PositiveInt, PositiveInt] | None = None  # first and last update of a profiler trace
    numerics_interval: Count = 0  # updates between samples of amaxes, saturation and kurtosis; 0: never
    saturation_threshold: Fraction = 1e-3  # share of saturated FP8 elements of a tensor that is an event

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.profile is not None and self.profile[0] > self.profile[1]:
            raise ValueError(f"log.profile {list(self.profile)} ends before it begins; give [first, last]")
        return self


class EvalSection(Section):
    """Held-out evaluation, at both edges of every stage and every ``interval`` updates (0: edges only)."""

    heldout: str | None = None
    tokenizer: str | None = None
    interval: Count = 0

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.heldout is None) != (self.tokenizer is None):
            raise ValueError("eval.heldout and eval.tokenizer go together; give both or neither")
        if self.heldout is None and self.interval:
            raise ValueError(
                "eval.interval has no effect without eval.heldout; set eval.heldout or interval 0"
            )
        return self


class StageSection(Section):
    """A dataset, its order and a budget of updates.

    ``data`` is the folder of a shard set, or the prefix of a Megatron indexed dataset.
    """

    name: str
    data: str
    updates: PositiveInt
