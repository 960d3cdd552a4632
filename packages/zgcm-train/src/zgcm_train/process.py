"""One process of a run: alone, or one of many that torchrun started."""

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import Store

from zgcm_train.console import evaluation_line, progress_console, train_line
from zgcm_train.errors import ZgcmError
from zgcm_train.files import write_atomic
from zgcm_train.meeting import meet, place_of_torchrun
from zgcm_train.processes import is_main
from zgcm_train.recipe_file import load_recipe
from zgcm_train.report import write_report
from zgcm_train.run import run_recipe

LAST_ERROR = Path("logs") / "last_error.json"


def run_process(recipe_source: str, folder: Path, settings: Sequence[str], *, accept_changes: bool) -> None:
    """Train a recipe in this process and, on rank 0, write the report.

    Args:
        recipe_source: a TOML file or the name of a built-in recipe.
        folder: the run folder.
        settings: overrides ``section.key=value``.
        accept_changes: go on in a folder whose recipe differs in what is learned.

    Raises:
        ZgcmError: what went wrong, by kind.
    """
    recipe = load_recipe(recipe_source, settings)
    console = progress_console()
    join_torchrun(recipe.parallel.hang_timeout, recipe.parallel.meet_timeout)
    try:
        run_recipe(
            recipe,
            folder,
            observe=lambda kind, value: print_event(console, kind, value, recipe.total_updates),
            accept_changes=accept_changes,
        )
        if is_main():
            print(write_report(folder))
    except ZgcmError as error:
        _leave_note(folder, error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _leave_note(folder: Path, error: ZgcmError) -> None:
    """Write why the run ended, for the launcher: torchrun does not hand on exit codes."""
    if is_main() and (folder / LAST_ERROR).parent.is_dir():
        note = {"exit_code": error.exit_code, "error": str(error)}
        write_atomic(folder / LAST_ERROR, json.dumps(note) + "\n")


def join_torchrun(hang_timeout: float = 0.0, meet_timeout: float = 600.0) -> None:
    """Join the process group that torchrun describes in the environment, if it does.

    Args:
        hang_timeout: seconds after which the watchdog ends the run; a collective gives up later than that.
        meet_timeout: seconds for all ranks to come, and again for all to join.

    Raises:
        MeetingError: some ranks did not come.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    place, patience = place_of_torchrun(), timedelta(seconds=max(1800.0, 2 * hang_timeout))

    def join(store: Store) -> None:
        store.set_timeout(patience)
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.world,
            timeout=patience,
        )

    meet(place, meet_timeout, join)


def print_event(console: Console, kind: str, value: Any, total: int) -> None:
    """Print one event of ``run_recipe`` for people.

    Args:
        console: where progress goes.
        kind: ``header``, ``warning``, ``train`` or ``eval``.
        value: what came with it.
        total: updates of the whole run.
    """
    if kind == "train":
        console.print(train_line(value, total), soft_wrap=True)
    elif kind == "eval":
        console.print(evaluation_line(value), soft_wrap=True)
    elif kind == "header":
        console.print("\n".join(value), soft_wrap=True)
    else:
        console.print(f"warning: {value}", style="yellow", soft_wrap=True)
