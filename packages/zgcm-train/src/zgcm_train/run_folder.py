"""The folder of a run: its effective recipe, its environment and who may go on in it."""

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from zgcm_train.config import Recipe
from zgcm_train.errors import ConfigurationError, explain_os_error
from zgcm_train.files import write_atomic
from zgcm_train.recipe_file import dump_recipe, load_recipe

# These sections say how a run is watched, stored and spread, not what it learns.
FREE_SECTIONS = frozenset({"log", "checkpoint", "eval", "parallel"})
PACKAGES = (
    "zgcm-model",
    "zgcm-optim",
    "zgcm-data",
    "zgcm-train",
    "zgcm-eval",
    "torch",
    "numpy",
    "daft",
    "tokenizers",
)


def prepare_folder(folder: Path, recipe: Recipe, *, accept_changes: bool = False) -> None:
    """Create the run folder, or check that it holds the same run.

    Args:
        folder: the run folder.
        recipe: the effective recipe; written as ``recipe.toml``.
        accept_changes: go on although settings that decide what is learned differ.

    Raises:
        ConfigurationError: the folder holds a run with other settings, each named.
        PathError: the folder cannot be written.
    """
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        file = folder / "recipe.toml"
        if file.exists():
            changed = differences(load_recipe(file), recipe)
            if changed and not accept_changes:
                raise ConfigurationError(
                    f"{folder} holds a run with other settings: {'; '.join(changed)}. Use the same settings, another "
                    "folder, or --accept-changes if the difference is meant."
                )
        write_atomic(file, dump_recipe(recipe))
        write_atomic(folder / "environment.json", json.dumps(describe_environment(), indent=1) + "\n")
    except OSError as error:
        raise explain_os_error(error, f"preparing the run folder {folder}") from error


def differences(old: Recipe, new: Recipe) -> list[str]:
    """List the settings that decide what is learned and differ, as ``section.key old -> new``."""
    found: list[str] = []
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for stage in (*before["stage"], *after["stage"]):
        del stage["data"]  # a set may be moved; its digest is compared instead
    for section in before.keys() - FREE_SECTIONS:
        _compare(section, before[section], after[section], found)
    return sorted(found)


def _compare(place: str, old: Any, new: Any, found: list[str]) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            _compare(f"{place}.{key}", old.get(key), new.get(key), found)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            _compare(f"{place}.{index}", left, right, found)
    elif old != new:
        found.append(f"{place} {old!r} -> {new!r}")


def describe_environment() -> dict[str, Any]:
    """Return versions and hardware that the numbers of a run depend on."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
