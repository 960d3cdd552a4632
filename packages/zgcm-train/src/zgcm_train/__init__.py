"""Plan, run, verify and resume pretraining, from raw text to an evaluated model.

A run is a *recipe* (``Recipe``, TOML on disk) and a *folder*. ``run_recipe`` trains every stage of the recipe that
the folder does not hold yet; each start but the first restores the newest whole checkpoint, so switching a stage
and resuming after a crash are one path. ``make_plan`` says before a run what it will do, ``verify_run`` proves
afterwards that its records agree, ``write_report`` shows it.

    from pathlib import Path
    from zgcm_train import load_recipe, run_recipe

    run_recipe(load_recipe("recipe.toml"), Path("runs/first"))
"""

import importlib
from typing import TYPE_CHECKING, Any

from zgcm_train._version import __version__

if TYPE_CHECKING:
    from zgcm_train.check import check_recipe_data
    from zgcm_train.config import Recipe
    from zgcm_train.plan import make_plan
    from zgcm_train.recipe_file import dump_recipe, load_recipe
    from zgcm_train.report import write_report
    from zgcm_train.run import run_recipe
    from zgcm_train.trainer import Hook, Trainer
    from zgcm_train.verify import verify_run

__all__ = [
    "Hook",
    "Recipe",
    "Trainer",
    "__version__",
    "check_recipe_data",
    "dump_recipe",
    "load_recipe",
    "make_plan",
    "run_recipe",
    "verify_run",
    "write_report",
]

# Imported on first use, so that `zgcm-train --help` does not wait for torch.
_HOMES = {
    "Hook": "trainer",
    "Recipe": "config",
    "Trainer": "trainer",
    "check_recipe_data": "check",
    "dump_recipe": "recipe_file",
    "load_recipe": "recipe_file",
    "make_plan": "plan",
    "run_recipe": "run",
    "verify_run": "verify",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zgcm_train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"zgcm_train.{_HOMES[name]}"), name)
