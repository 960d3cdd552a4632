"""Run a recipe through its stages, from wherever its folder stands."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zgcm_train.assembly import build_parts
from zgcm_train.checkpoint import Progress, newest_complete
from zgcm_train.checkpoint.folder import remove_unfinished
from zgcm_train.config import Recipe
from zgcm_train.errors import CheckpointError, explain_os_error
from zgcm_train.header import header_lines
from zgcm_train.hooks import (
    CheckpointHook,
    EvaluationHook,
    LedgerHook,
    MetricsHook,
    NumericsHook,
    ProfilerHook,
    StopHook,
    WandbHook,
    WatchdogHook,
)
from zgcm_train.processes import barrier, is_main
from zgcm_train.run_folder import prepare_folder
from zgcm_train.trainer import Hook, Parts, Trainer

Observer = Callable[[str, Any], None]


def run_recipe(
    recipe: Recipe,
    folder: Path,
    *,
    observe: Observer | None = None,
    hooks: Sequence[Hook] = (),
    accept_changes: bool = False,
) -> Progress:
    """Train every stage that is not done yet; each stage starts from a checkpoint on disk.

    The first stage starts from the seed. Every later start, of a stage or of an interrupted run, restores the
    newest whole checkpoint, so a stage switch takes the very path of a resume.

    Args:
        recipe: the effective recipe.
        folder: the run folder.
        observe: called as ``observe(kind, value)`` with ``header``, ``warning``, ``train`` and ``eval`` on rank 0.
        hooks: further hooks, called after the built-in ones.
        accept_changes: go on in a folder whose recipe differs in what is learned.

    Returns:
        Where the run stands at its end.

    Raises:
        ZgcmError: what went wrong, by kind; everything finished is kept.
    """
    tell = observe if observe is not None and is_main() else _silent
    watchdog = WatchdogHook(folder, recipe.parallel.hang_timeout)
    try:
        watchdog.start()
        if is_main():
            prepare_folder(folder, recipe, accept_changes=accept_changes)
            remove_unfinished(folder / "checkpoints")
        barrier()
        return _train_stages(recipe, folder, tell, [watchdog, *hooks])
    except OSError as error:
        raise explain_os_error(error, f"training in {folder}") from error
    finally:
        watchdog.stop()


def _train_stages(recipe: Recipe, folder: Path, tell: Observer, hooks: Sequence[Hook]) -> Progress:
    while True:
        parts = _restore_parts(recipe, folder, tell)
        trainer = Trainer(parts, [*hooks[:1], *_built_in_hooks(recipe, folder, tell), *hooks[1:]])
        trainer.last_save = parts.progress.step if parts.progress.step else -1
        tell("header", header_lines(parts))
        trainer.fit()
        if parts.progress.step == recipe.total_updates:
            return parts.progress


def _restore_parts(recipe: Recipe, folder: Path, tell: Observer) -> Parts:
    checkpoint, passed_over = newest_complete(folder / "checkpoints")
    for fault in passed_over:
        tell("warning", f"passed over: {fault}")
    if checkpoint is None and passed_over:
        raise CheckpointError(
            f"No whole checkpoint is left in {folder / 'checkpoints'}; the newest fault: "
            f"{passed_over[0]}. Remove the folder to start anew."
        )
    return build_parts(recipe, folder, checkpoint)


def _built_in_hooks(recipe: Recipe, folder: Path, tell: Observer) -> list[Hook]:
    log = recipe.log
    board = None
    if log.wandb is not None:
        board = WandbHook(log.wandb, recipe.run.name, folder, recipe.model_dump(mode="json"))

    def show(kind: str, record: dict[str, Any]) -> None:
        tell(kind, record)
        if board is not None:
            board.record(record)

    evaluation: list[Hook] = []
    if recipe.eval.heldout is not None and recipe.eval.tokenizer is not None:
        heldout, tokenizer = Path(recipe.eval.heldout), Path(recipe.eval.tokenizer)
        evaluation.append(EvaluationHook(heldout, tokenizer, line=lambda record: show("eval", record)))
    metrics = MetricsHook(
        line=lambda record: show("train", record), warn=lambda message: tell("warning", message)
    )
    watchers: list[Hook] = [] if log.profile is None else [ProfilerHook(*log.profile)]
    if log.numerics_interval:
        watchers.append(NumericsHook(warn=lambda message: tell("warning", message)))
    # Metrics come first, so that records of repeated updates are dropped before an evaluation looks for its own;
    # the ledger is written before the checkpoint that depends on it.
    boards: list[Hook] = [] if board is None else [board]
    return [metrics, *watchers, *evaluation, LedgerHook(), CheckpointHook(), StopHook(), *boards]


def _silent(kind: str, value: Any) -> None:
    pass
