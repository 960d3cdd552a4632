"""The variables of the published launcher, and what becomes of each in a recipe.

A rule either maps a variable to a recipe key, or holds it against what this implementation does anyway, or says why it
is left out. Checks between variables are in ``envs``.

Source: ZGCM-1 release, pretraining and mid-training stage files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zgcm_model import ModelConfig

PRESET = "zgcm-1-7b"


def choice(**values: Any) -> Callable[[str], Any]:
    """Return a reader that maps words; others are refused.

    Args:
        **values: by word.
    """

    def read(text: str) -> Any:
        if text not in values:
            raise ValueError(f"has no counterpart; known are {', '.join(values)}")
        return values[text]

    return read


@dataclass(frozen=True)
class Mapped:
    """Becomes a recipe key.

    Attributes:
        key: ``section.key``.
        read: turns the text into the value.
    """

    key: str
    read: Callable[[str], Any] = int


@dataclass(frozen=True)
class Fixed:
    """Must say what this implementation does anyway.

    Attributes:
        value: what it must be.
        read: turns the text into something to compare.
        why: what stands for it here.
    """

    value: Any
    why: str
    read: Callable[[str], Any] = str


@dataclass(frozen=True)
class LeftOut:
    """Has no counterpart.

    Attributes:
        why: the reason.
    """

    why: str


Rule = Mapped | Fixed | LeftOut

MODEL: dict[str, Rule] = {
    "NUM_LAYERS": Mapped("model.num_layers"),
    "HIDDEN_SIZE": Mapped("model.hidden_size"),
    "FFN_HIDDEN_SIZE": Mapped("model.intermediate_size"),
    "NUM_ATTENTION_HEADS": Mapped("model.num_heads"),
    "NUM_QUERY_GROUPS": Mapped("model.num_kv_heads"),
    "KV_CHANNELS": Mapped("model.head_dim"),
    "VOCAB_SIZE": Mapped("model.vocab_size"),
    "ROTARY_BASE": Mapped("model.rotary_base", float),
    "MAX_POSITION_EMBEDDINGS": Mapped("model.max_positions"),
    "POSITION_EMBEDDING_TYPE": Fixed("rope", "the only kind of positions"),
    "QK_LAYERNORM": Fixed(1, "queries and keys are normalized in every layer", int),
    "ATTENTION_OUTPUT_GATE": Fixed(1, "window layers carry a gate", int),
    "ATTENTION_OUTPUT_GATE_ONLY_SWA": Fixed(1, "global layers carry none", int),
}

OPTIMIZER: dict[str, Rule] = {
    "OPTIMIZER": Fixed("muon", "the only optimizer"),
    "LR": Mapped("optimizer.lr", float),
    "WEIGHT_DECAY": Mapped("optimizer.weight_decay", float),
    "CLIP_GRAD": Mapped("optimizer.clip_norm", float),
    "MUON_MOMENTUM": Mapped("optimizer.momentum", float),
    "MUON_NUM_NS_STEPS": Mapped("optimizer.steps"),
    "MUON_EXTRA_SCALE_FACTOR": Mapped("optimizer.extra_scale", float),
    "MUON_COEFFIC_TYPE": Mapped(
        "optimizer.coefficients", choice(quintic="quintic", simple="simple", polar_express="polar_express")
    ),
    "MUON_SCALE_MODE": Mapped(
        "optimizer.scale", choice(spectral="spectral", shape_scaling="shape", unit_rms_norm="unit_rms")
    ),
    "MUON_TP_MODE": Mapped(
        "optimizer.sharded", choice(blockwise="blockwise", duplicated="exact", distributed="exact")
    ),
    "MUON_FP32_MATMUL_PREC": Mapped("optimizer.dtype", choice(medium="bfloat16", highest="float32")),
    "MUON_SCALAR_OPTIMIZER": Fixed("adam", "what is no hidden matrix gets Adam"),
    "LR_DECAY_STYLE": Mapped(
        "schedule.kind", choice(constant="constant", cosine="cosine", WSD="warmup_stable_decay")
    ),
}

PRECISION: dict[str, Rule] = {
    "FP8_FORMAT": Mapped("precision.fp8", choice(hybrid="hybrid", e4m3="e4m3")),
    "FP8_RECIPE": Fixed("delayed", "the only scaling"),
    "FP8_AMAX_COMPUTE_ALGO": Mapped("precision.amax_compute", str),
    "FP8_AMAX_HISTORY_LEN": Mapped("precision.amax_history_len"),
    "FP8_PARAM_GATHER": Mapped("precision.gather", choice(**{"0": "float32", "1": "fp8"})),
}

RUN: dict[str, Rule] = {
    "SEED": Mapped("run.seed"),
    "TP_SIZE": Mapped("parallel.tp"),
    "PP_SIZE": Mapped("parallel.pp"),
    "CP_SIZE": Mapped("parallel.cp"),
    "MICRO_BATCH_SIZE": Mapped("data.micro_batch"),
    "GLOBAL_BATCH_SIZE": Mapped("data.global_batch"),
    "SEQ_LENGTH": Mapped("data.sequence_length"),
    "SAVE_INTERVAL": Mapped("checkpoint.interval"),
    "LOG_INTERVAL": Mapped("log.interval"),
}

# Read together in ``envs``: what each becomes is said there.
JOINT = {
    "EXP_NAME": "stage.name",
    "REAL_DATA_PREFIX": "stage.data",
    "TRAIN_ITERS": "stage.updates",
    "TRAIN_SAMPLES": "stage.updates",
    "LR_WARMUP_ITERS": "schedule.warmup_updates",
    "LR_WARMUP_SAMPLES": "schedule.warmup_updates",
    "MIN_LR": "schedule.min_lr",
    "ADAM_BETA1": "optimizer.betas",
    "ADAM_BETA2": "optimizer.betas",
    "NUM_NODES": "parallel.dp_shard",
    "GPUS_PER_NODE": "parallel.dp_shard",
    "ENABLE_RECOMPUTE": "parallel.recompute",
    "RECOMPUTE_GRANULARITY": "parallel.recompute",
    "RESUME_ITER": "stage.updates",
    "RESUME_CONSUMED_SAMPLES": "checked",
    "MEGATRON_DATASET_SAMPLE_OFFSET": "checked",
    "LR_DECAY_SAMPLES": "checked",
}

_PLACE = "names a place of the launcher; zgcm-train takes --out"
_ENGINE = "a choice of the launcher's engine; without effect on what is learned"
_LOADER = "the loader needs no such setting"
_RANK = "torchrun and zgcm-train launch say it"
_RUNTIME = "set it in the environment if you need it; not part of a recipe"
_RESUME = "a run folder goes on where its newest whole checkpoint stands"
REASONS: dict[str, str] = {
    **dict.fromkeys(("SHARED_STORAGE_ROOT", "MEGATRON_LM_ROOT", "MEGATRON_VENV", "TORCHRUN_BIN"), _PLACE),
    **dict.fromkeys(
        ("TRAIN_ROOT", "OUTPUT_ROOT", "SAVE_CHECKPOINT_DIR", "TENSORBOARD_DIR", "LOG_DIR"), _PLACE
    ),
    **dict.fromkeys(("DATA_CACHE_DIR", "TRANSFORMER_ENGINE_HOME", "FLASH_ATTN_V3_EGG"), _PLACE),
    **dict.fromkeys(("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "ZGCM_REPO_ROOT"), _RANK),
    **dict.fromkeys(("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF"), _RUNTIME),
    **dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_DEBUG", "NVTE_CUDA_ARCHS"), _RUNTIME),
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), _RUNTIME),
    **dict.fromkeys(("ATTENTION_BACKEND", "TRANSFORMER_IMPL", "NO_ROPE_FUSION", "TRAIN_PROGRAM"), _ENGINE),
    **dict.fromkeys(("USE_DISTRIBUTED_OPTIMIZER", "ENABLE_OVERLAP_GRAD_REDUCE", "RERUN_MODE"), _ENGINE),
    **dict.fromkeys(("ENABLE_OVERLAP_PARAM_GATHER", "ENABLE_CROSS_ENTROPY_LOSS_FUSION"), _ENGINE),
    **dict.fromkeys(("CP_COMM_TYPE", "CROSS_ENTROPY_FUSION_IMPL"), _ENGINE),
    **dict.fromkeys(("RECOMPUTE_METHOD", "RECOMPUTE_NUM_LAYERS"), _ENGINE),
    **dict.fromkeys(("DATA_NUM_WORKERS", "NUM_DATASET_BUILDER_THREADS"), _LOADER),
    "MEGATRON_DATALOADER_PREFETCH_FACTOR": _LOADER,
    **dict.fromkeys(("REQUIRE_LOAD_CHECKPOINT", "LOAD_CHECKPOINT_DIR"), _RESUME),
    "OVERRIDE_OPT_PARAM_SCHEDULER": "the recipe's schedule always holds",
    "TOKENIZER_PATH": "the data name their tokenizer; its digest is checked",
    "DATA_ARGS_PATH": "a list of blended files; mix when the data are built and set stage.data",
    "DATA_SPLIT": "held-out sets are files of their own, see eval.heldout",
    "EVAL_INTERVAL": "see eval.interval",
    "EVAL_ITERS": "held-out sets are always scored whole",
    "NO_DATA_SHUFFLE": "rows are read in the stored order, always; shuffle when the data are built",
    "GLOBAL_SHUFFLE_SEED": "says how the data were shuffled; their manifest does",
    "MIDTRAIN_LONG64K_ROOT": "where data are mixed from; not needed to train",
    "MIDTRAIN_SHORT16K_ROOT": "where data are mixed from; not needed to train",
    "PRETRAINED_CHECKPOINT": "weights to start from have no recipe key; the run starts fresh",
}


def architecture_rules() -> dict[str, Rule]:
    """Return the rules for what a preset fixes and no recipe key changes."""
    preset = ModelConfig.preset(PRESET)
    return {
        "ROTARY_PERCENT": Fixed(preset.rotary_percent, "part of the preset", float),
        "NORM_EPSILON": Fixed(preset.norm_eps, "part of the preset", float),
        "WINDOW_SIZE": Fixed(f"{preset.window - 1},0", "keys before the current one; part of the preset"),
        "WINDOW_ATTN_SKIP_FREQ": Fixed(preset.global_every, "part of the preset", int),
    }


def rules() -> Mapping[str, Rule]:
    """Return the rule of every variable that is read by itself."""
    left_out = {key: LeftOut(why) for key, why in REASONS.items()}
    return {**MODEL, **architecture_rules(), **OPTIMIZER, **PRECISION, **RUN, **left_out}
