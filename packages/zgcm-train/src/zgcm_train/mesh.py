"""The mesh of devices that a recipe asks for, checked before anything is built."""

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zgcm_model import ModelConfig
from zgcm_train.config import Recipe
from zgcm_train.errors import ConfigurationError
from zgcm_train.processes import world_size

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Layout:
    """The axes of a run and the groups that follow from them; None where an axis has one rank.

    Attributes:
        tensor: the tensor-parallel axis.
        context: the context-parallel axis.
        pipeline: the pipeline axis; all its stages read the same rows.
        sharding: the mesh FSDP works on: replicas by shards, or shards alone. Context-parallel ranks hold
            shards of the same weights, so they are part of it.
        data: data-parallel ranks, which read different rows.
        loss: the ranks of a stage whose loss sums add up: data- and context-parallel ones.
        data_rank: this process's number among the data-parallel ranks.
    """

    tensor: DeviceMesh | None = None
    context: DeviceMesh | None = None
    pipeline: DeviceMesh | None = None
    sharding: DeviceMesh | None = None
    data: ProcessGroup | None = None
    loss: ProcessGroup | None = None
    data_rank: int = 0


def default_device() -> torch.device:
    """Return the accelerator of this process, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def build_layout(recipe: Recipe, device: torch.device) -> Layout:
    """Return the layout of this process's run.

    Args:
        recipe: its ``parallel`` section gives the sizes of the axes.
        device: its type names the mesh's devices.

    Raises:
        ConfigurationError: the sizes do not multiply to the number of processes, or do not divide the model.
    """
    parallel = recipe.parallel
    refuse_misfit(recipe, world_size())
    if world_size() == 1:
        return Layout()
    sizes = tuple(getattr(parallel, axis) for axis in AXES)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    data = mesh["dp_replicate", "dp_shard"]._flatten("data")
    loss = mesh["dp_replicate", "dp_shard", "cp"]._flatten("loss")
    return Layout(
        tensor=mesh["tp"] if parallel.tp > 1 else None,
        context=mesh["cp"] if parallel.cp > 1 else None,
        pipeline=mesh["pp"] if parallel.pp > 1 else None,
        sharding=_sharding(mesh) if loss.size() > 1 else None,
        data=data.get_group() if data.size() > 1 else None,
        loss=loss.get_group() if loss.size() > 1 else None,
        data_rank=data.get_local_rank(),
    )


def _sharding(mesh: DeviceMesh) -> DeviceMesh:
    shards = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    replicas = mesh["dp_replicate"]
    return DeviceMesh._concatenate([replicas, shards]) if replicas.size() > 1 else shards


def refuse_misfit(recipe: Recipe, devices: int) -> None:
    """Refuse a layout that does not fit the processes, the model or the rows.

    Args:
        recipe: the effective recipe.
        devices: number of processes.

    Raises:
        ConfigurationError: names both numbers and the remedy.
    """
    parallel = recipe.parallel
    if parallel.devices != devices:
        raise ConfigurationError(
            f"parallel asks for {parallel.devices} devices and {devices} run; start {parallel.devices} processes "
            "with torchrun --nproc-per-node or change the sizes in [parallel]."
        )
    _refuse_model_misfit(recipe.model.architecture(), parallel.tp, parallel.cp)
    stretch = parallel.tp * parallel.cp
    if recipe.data.sequence_length % stretch:
        raise ConfigurationError(
            f"data.sequence_length {recipe.data.sequence_length} does not divide over parallel.tp {parallel.tp} times "
            f"parallel.cp {parallel.cp}; use a multiple of {stretch}."
        )
    if parallel.pp > 1:
        _refuse_pipeline_misfit(recipe)


def _refuse_pipeline_misfit(recipe: Recipe) -> None:
    stages, layers = recipe.parallel.pp, recipe.model.architecture().num_layers
    if layers < stages:
        raise ConfigurationError(
            f"parallel.pp {stages} has more stages than the model's {layers} layers; use at most {layers}."
        )
    if recipe.accumulation < stages:
        raise ConfigurationError(
            f"parallel.pp {stages} needs at least {stages} micro-batches per update and has {recipe.accumulation}; "
            "lower data.micro_batch or parallel.dp_shard, or raise data.global_batch."
        )
    if recipe.parallel.gradient_sync == "every":
        raise ConfigurationError(
            'parallel.gradient_sync "every" is not for pipelines, which reduce gradients once per update; set it to '
            '"last" or parallel.pp to 1.'
        )


def _refuse_model_misfit(model: ModelConfig, tp: int, cp: int) -> None:
    for name, size in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
        if size % (tp * cp):
            raise ConfigurationError(
                f"model.{name} {size} does not divide over parallel.tp {tp} times parallel.cp {cp}; use sizes whose "
                f"product divides {size}."
            )
    for name, size in (("intermediate_size", model.intermediate_size), ("vocab_size", model.vocab_size)):
        if size % tp:
            raise ConfigurationError(
                f"model.{name} {size} does not divide over parallel.tp {tp}; use a multiple of {tp}."
            )
