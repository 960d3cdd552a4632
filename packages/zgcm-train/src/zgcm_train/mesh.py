"""The mesh of devices that a recipe asks for, checked before anything is built."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zgcm_train.config import ParallelSection
from zgcm_train.errors import ConfigurationError
from zgcm_train.processes import world_size


def default_device() -> torch.device:
    """Return the accelerator of this process, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def build_mesh(parallel: ParallelSection, device: torch.device) -> DeviceMesh | None:
    """Return the data-parallel mesh, or None for one process.

    Args:
        parallel: sizes of the axes.
        device: its type names the mesh's devices.

    Raises:
        ConfigurationError: the sizes do not multiply to the number of processes, or name an axis that training
            does not run yet.
    """
    world = world_size()
    if parallel.devices != world:
        raise ConfigurationError(
            f"parallel asks for {parallel.devices} devices and {world} run; start {parallel.devices} processes with "
            "torchrun --nproc-per-node or change the sizes in [parallel]."
        )
    if parallel.cp * parallel.tp * parallel.pp > 1:
        raise ConfigurationError(
            f"parallel.cp {parallel.cp}, parallel.tp {parallel.tp} and parallel.pp {parallel.pp} can be planned but "
            "not run by this version; set them to 1 and use parallel.dp_shard."
        )
    if world == 1:
        return None
    return init_device_mesh(
        device.type, (parallel.dp_replicate, parallel.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
