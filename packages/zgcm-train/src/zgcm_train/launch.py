"""Start a run on many processes with torchrun, after the recipe has been checked against them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zgcm_train.config import Recipe
from zgcm_train.errors import ConfigurationError
from zgcm_train.mesh import refuse_misfit
from zgcm_train.process import LAST_ERROR
from zgcm_train.recipe_file import load_recipe
from zgcm_train.stage_data import open_stage

FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""A store of its own for every start. torchrun would keep one over all restarts, with the addresses that the ranks
before had left in it, where the ranks of the next start then look for each other."""


@dataclass(frozen=True)
class Machines:
    """Where the processes run.

    Attributes:
        nodes: number of machines.
        endpoint: host and port of the first machine, the same on all; needed with more than one.
        max_restarts: how often torchrun starts the processes again after one of them died.
    """

    nodes: int = 1
    endpoint: str | None = None
    max_restarts: int = 3


def launch(source: str, folder: Path, settings: Sequence[str], machines: Machines) -> int:
    """Check the recipe, then run it under torchrun; call it once on every machine.

    Args:
        source: a TOML file or the name of a built-in recipe.
        folder: the run folder, on storage that every machine sees.
        settings: overrides ``section.key=value``.
        machines: where the processes run.

    Returns:
        The exit code of the run: 0, or that of the error that ended it.

    Raises:
        ZgcmError: the recipe does not fit the machines or its data.
    """
    recipe = load_recipe(source, settings)
    refuse_misfit(recipe, recipe.parallel.devices)
    for number in range(len(recipe.stage)):
        open_stage(recipe, number)
    command = torchrun_command(recipe, machines, ["run", source, "--out", str(folder), *_options(settings)])
    error = folder / LAST_ERROR
    error.unlink(missing_ok=True)
    code = subprocess.run(command, check=False, env=os.environ | FRESH_STORE).returncode
    if code and error.exists():
        return int(json.loads(error.read_text(encoding="utf-8"))["exit_code"])
    return code


def torchrun_command(recipe: Recipe, machines: Machines, arguments: Sequence[str]) -> list[str]:
    """Return the command line of torchrun for one machine.

    Args:
        recipe: its mesh gives the number of processes.
        machines: where they run.
        arguments: of ``zgcm-train``.

    Raises:
        ConfigurationError: the processes do not divide over the machines, or their meeting point is not given.
    """
    devices, nodes = recipe.parallel.devices, machines.nodes
    if devices % nodes:
        raise ConfigurationError(
            f"{devices} devices do not divide over {nodes} nodes; change --nodes or [parallel]."
        )
    if nodes > 1 and machines.endpoint is None:
        raise ConfigurationError("More than one node needs --endpoint HOST:PORT of the first one.")
    meeting = ["--standalone"]
    if machines.endpoint is not None:
        meeting = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={machines.endpoint}"]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *meeting,
        f"--nproc-per-node={devices // nodes}",
        f"--max-restarts={machines.max_restarts}",
        "-m",
        "zgcm_train",
        *arguments,
    ]


def _options(settings: Sequence[str]) -> list[str]:
    return [text for setting in settings for text in ("--set", setting)]
