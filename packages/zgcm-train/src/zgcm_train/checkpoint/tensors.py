"""Save and load weights, optimizer state and random state with PyTorch's distributed checkpoint.

Every tensor has a flat name: ``model.<parameter>``, ``optimizer.<parameter>.<state>``, ``rng.<rank>``. Optimizer state
is named by parameter, so it does not depend on how parameters are grouped or sharded.
"""

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from zgcm_model.precision import find_switch, is_applied, is_state_name
from zgcm_train.checkpoint.folder import Checkpoint, folder_name, seal
from zgcm_train.checkpoint.progress import Identity, Progress, dump_state
from zgcm_train.errors import CheckpointError, explain_os_error, find_os_error
from zgcm_train.files import write_atomic
from zgcm_train.processes import of_all, of_main, rank


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer, progress: Progress, identity: Identity
) -> Path:
    """Save everything a strict resume needs; every rank calls this.

    Args:
        folder: where the ``step-*`` folders are.
        model: its parameters may be sharded.
        optimizer: its state is saved under the parameters' names.
        progress: where the run stands.
        identity: what the run is.

    Returns:
        The new checkpoint's folder, complete.

    Raises:
        PathError: the disk is full or not writable; older checkpoints are untouched. Every rank raises it.
    """
    final = folder / folder_name(progress.step)
    write_checkpoint(final, collect_tensors(model, optimizer), dump_state(progress, identity))
    return final


def collect_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return every tensor of a checkpoint by name: weights, optimizer state and this rank's random state."""
    return _named_state(model, optimizer) | {f"rng.{rank()}": torch.get_rng_state()}


def write_checkpoint(
    final: Path, tensors: dict[str, Any], state: str, group: dist.ProcessGroup | None = None
) -> None:
    """Write one checkpoint and complete it; every rank calls this.

    Args:
        final: its folder.
        tensors: from ``collect_tensors``.
        state: the text of ``state.json``.
        group: all ranks, as a group that nothing else uses meanwhile; the default group when None.

    Raises:
        PathError: the disk is full or not writable; the same on every rank.
    """
    temporary = final.with_name(f".{final.name}.tmp")
    failure: BaseException | None = None
    try:
        _save_tensors(temporary, tensors, group)
        if rank() == 0:
            write_atomic(temporary / "state.json", state)
            seal(temporary, final)
    except (OSError, CheckpointException) as error:
        failure = error
    # Only the first rank seals, so the others learn from it how the save ended.
    explained = of_main(None if failure is None else _explain(failure, final.name), group)
    if explained is not None:
        shutil.rmtree(temporary, ignore_errors=True)
        raise explained from failure
    if failure is not None:
        raise failure


def _save_tensors(temporary: Path, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    made = None
    if rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            made = error
    made = of_main(made, group)
    if made is not None:
        raise made
    with _without_single_process_warning():
        save(
            tensors,
            checkpoint_id=temporary / "tensors",
            process_group=group,
            no_dist=not dist.is_initialized(),
        )


def _explain(error: BaseException, name: str) -> BaseException:
    cause = find_os_error(error)
    return error if cause is None else explain_os_error(cause, f"saving {name}")


def load_checkpoint(
    checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer | None, *, allow_switch: bool = False
) -> None:
    """Load weights, optimizer state and random state in place; every rank calls this.

    Args:
        checkpoint: a whole checkpoint; its digests have been compared.
        model: takes the weights, whatever its sharding.
        optimizer: takes the state; None for weights only.
        allow_switch: take a checkpoint of the other kind, with or without FP8; its scales are left out, or start
            anew. Weights alone may always switch.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape, each listed; or FP8 was switched on or
            off and that is not allowed.
    """
    reader = FileSystemReader(checkpoint.path / "tensors")
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    target = _named_state(model, optimizer)
    if _switches_precision(saved, model, str(checkpoint.path), allow_switch or optimizer is None):
        saved, target = ({n: t for n, t in names.items() if not _is_scale(n)} for names in (saved, target))
    _refuse_differences(saved, target, str(checkpoint.path), whole=optimizer is not None)
    random_state = f"rng.{rank()}"
    if optimizer is not None and random_state in saved:
        target[random_state] = torch.empty_like(torch.get_rng_state())
    with _without_single_process_warning():
        load(target, storage_reader=reader, no_dist=not dist.is_initialized())
    if random_state in target:
        torch.set_rng_state(target[random_state])


@contextlib.contextmanager
def _without_single_process_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield


def _named_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Name every tensor; the optimizer has created all of its state, so loading fills it in place."""
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        if optimizer is not None:
            state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    if is_applied(model):
        state |= {f"model.{name}": t for name, t in model.state_dict().items() if is_state_name(name)}
    return state


def _switches_precision(saved: dict[str, Any], model: nn.Module, place: str, allowed: bool) -> bool:
    switch = find_switch((name.removeprefix("model.") for name in saved), model)
    if switch != "none" and not allowed:
        was, now = ("without", "with") if switch == "to_fp8" else ("with", "without")
        raise CheckpointError(
            f"{place} was made {was} FP8 and the recipe trains {now} it; restore precision.fp8, or set "
            "precision.allow_switch to true if the switch is meant."
        )
    return switch != "none"


def _is_scale(name: str) -> bool:
    return is_state_name(name.removeprefix("model."))


def _refuse_differences(saved: dict[str, Any], target: dict[str, Any], place: str, *, whole: bool) -> None:
    """Compare names and shapes over all ranks together: a pipeline stage holds only some of the tensors."""
    kept = {k for k in saved if not k.startswith("rng.") and (whole or k.startswith("model."))}
    needed: dict[str, tuple[int, ...]] = {}
    for part in of_all({name: tuple(getattr(value, "shape", ())) for name, value in target.items()}):
        needed |= part
    missing, unexpected = sorted(needed.keys() - kept), sorted(kept - needed.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"{place} does not fit this model: missing {missing}, unexpected {unexpected}; "
            "restore the recipe it was made with."
        )
    for name in sorted(kept):
        size = tuple(getattr(saved[name], "size", None) or ())
        if name.startswith("model.") and size != needed[name]:
            raise CheckpointError(
                f"{place}: {name} has shape {size}, the model needs {needed[name]}; "
                "restore the recipe it was made with."
            )
