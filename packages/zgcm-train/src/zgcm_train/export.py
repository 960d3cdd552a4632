"""Export a checkpoint's weights for others."""

from pathlib import Path

import torch

from zgcm_model import Decoder, save_pretrained
from zgcm_train.checkpoint import Checkpoint, checkpoints, load_checkpoint, newest_complete
from zgcm_train.checkpoint.folder import folder_name, open_checkpoint
from zgcm_train.errors import CheckpointError
from zgcm_train.recipe_file import load_run_recipe


def export_run(folder: Path, out: Path, step: int | None = None) -> Path:
    """Write a checkpoint's weights as safetensors with the published names.

    Args:
        folder: the run folder.
        out: folder for the exported model.
        step: which checkpoint; the newest whole one by default.

    Returns:
        The folder written.

    Raises:
        CheckpointError: the checkpoint is missing, torn or altered.
        PathError: ``folder`` is not a run folder.
    """
    recipe = load_run_recipe(folder)
    checkpoint = _choose(folder / "checkpoints", step)
    with torch.device("meta"):
        decoder = Decoder(recipe.model.architecture())
    decoder.to_empty(device="cpu")
    load_checkpoint(checkpoint, decoder, None)
    save_pretrained(decoder, out)
    return out


def _choose(folder: Path, step: int | None) -> Checkpoint:
    if step is not None and not (folder / folder_name(step)).is_dir():
        steps = ", ".join(str(int(path.name.removeprefix("step-"))) for path in checkpoints(folder))
        raise CheckpointError(
            f"There is no checkpoint of step {step} in {folder}; there are: {steps or 'none'}."
        )
    if step is not None:
        return open_checkpoint(folder / folder_name(step))
    newest, passed_over = newest_complete(folder)
    if newest is None:
        raise CheckpointError(f"There is no whole checkpoint in {folder}. {' '.join(passed_over)}")
    return newest
