"""Save at intervals and keep the disk tidy."""

from pathlib import Path

from zgcm_train.checkpoint import prune
from zgcm_train.config import Recipe
from zgcm_train.processes import is_main
from zgcm_train.step import StepResult
from zgcm_train.trainer import Hook, Trainer


class CheckpointHook(Hook):
    """Saves every ``checkpoint.interval`` updates; the end of each stage is never deleted."""

    def step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Save when the interval is reached; never right after an update that was not finite."""
        if trainer.progress.step % trainer.parts.recipe.checkpoint.interval == 0 and result.applied:
            trainer.save()

    def saved(self, trainer: Trainer, checkpoint: Path) -> None:
        """Delete what is older than the recipe keeps."""
        recipe = trainer.parts.recipe
        if not is_main():
            return
        prune(checkpoint.parent, keep=recipe.checkpoint.keep, protected=stage_ends(recipe))


def stage_ends(recipe: Recipe) -> set[int]:
    """Return the steps at which the recipe's stages end."""
    return {recipe.first_update(number + 1) for number in range(len(recipe.stage))}
