"""The header of a run: what is about to be trained, how precisely, and on which data."""

from zgcm_model import flops_per_token
from zgcm_train.config import Recipe
from zgcm_train.console import short_count
from zgcm_train.trainer import Parts


def header_lines(parts: Parts) -> list[str]:
    """Return the lines that open a run or a stage."""
    recipe, progress = parts.recipe, parts.progress
    stage = recipe.stage[progress.stage]
    return [
        f"run {recipe.run.name}, stage {stage.name} ({progress.stage + 1} of {len(recipe.stage)}), "
        f"update {progress.step} of {recipe.total_updates}, row {progress.next_row} of this stage",
        *model_lines(recipe),
        f"attention across documents: {'on' if recipe.data.cross_document_attention else 'off'}",
        f"mesh: {mesh_text(recipe)}",
        f"data digest {parts.identity.data[stage.name][:16]}, tokenizer {parts.identity.tokenizer[:16]}, "
        f"recipe {parts.identity.recipe[:16]}",
        *precision_lines(recipe),
    ]


def model_lines(recipe: Recipe) -> list[str]:
    """Return size and cost of the model."""
    architecture = recipe.model.architecture()
    flops = flops_per_token(architecture, recipe.data.sequence_length)
    return [
        f"model {recipe.model.preset}: {architecture.num_parameters():,} parameters, {flops.total / 1e9:.4g} GFLOP "
        f"per token at {recipe.data.sequence_length} positions, {short_count(recipe.tokens_per_update)} tokens "
        "per update",
    ]


def mesh_text(recipe: Recipe) -> str:
    """Return the mesh as text, such as ``dp_shard 2``."""
    parallel = recipe.parallel
    sizes = {axis: getattr(parallel, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
    used = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return " x ".join(used) if used else "one device"


def precision_lines(recipe: Recipe) -> list[str]:
    """Return the five declarations of precision (rule R8)."""
    compute, iteration = recipe.precision.compute, recipe.optimizer.dtype
    skipped = recipe.optimizer.max_skipped
    return [
        "precision 1, storage: weights float32, which are their own master copy",
        f"precision 2, compute: forward and backward {compute}, loss and rotary angles float32",
        "precision 3, accumulation: gradients and residual sums over micro-batches float32",
        f"precision 4, communication and optimizer: gradients on the wire {recipe.precision.reduce}, moments float32, "
        f"Newton-Schulz in {iteration}",
        f"precision 5, scaling: no loss scale, no stochastic rounding; an update that is not finite is left out, "
        f"{skipped} in a row are allowed",
    ]
