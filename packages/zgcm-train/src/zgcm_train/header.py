"""The header of a run: what is about to be trained, how precisely, and on which data."""

import torch

from zgcm_model import Decoder, flops_per_token, precision
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
    """Return the five declarations of precision (rule R8), and what is computed in FP8 and what is not."""
    settings, optimizer = recipe.precision, recipe.optimizer
    products: str = settings.compute
    if settings.fp8 != "off":
        forward, backward = ("E4M3", "E5M2" if settings.fp8 == "hybrid" else "E4M3")
        products = f"projections FP8 ({forward} forward, {backward} gradients), all else {settings.compute}"
    scaling = "no loss scale" if settings.fp8 == "off" else _delayed(recipe)
    return [
        "precision 1, storage: weights float32, which are their own master copy",
        f"precision 2, compute: forward and backward {products}, loss and rotary angles float32",
        "precision 3, accumulation: gradients and residual sums over micro-batches float32",
        f"precision 4, communication and optimizer: gradients {settings.reduce}, moments float32, Newton-Schulz in "
        f"{optimizer.dtype}",
        f"precision 5, scaling: {scaling}, no stochastic rounding; an update that is not finite is left out, "
        f"{optimizer.max_skipped} in a row are allowed",
        *table_lines(recipe),
    ]


def _delayed(recipe: Recipe) -> str:
    settings = recipe.precision
    return (
        f"delayed scaling over {settings.amax_history_len} updates ({settings.amax_compute}, margin "
        f"{settings.margin}), largest values over all ranks"
    )


def table_lines(recipe: Recipe) -> list[str]:
    """Return which parts of which layers are computed in FP8; nothing when FP8 is off."""
    scaling = recipe.precision.scaling()
    if scaling is None:
        return []
    with torch.device("meta"):
        decoder = Decoder(recipe.model.architecture(), kernel="reference")
    precision.apply(
        decoder, scaling, backend=recipe.precision.backend, high_precision=recipe.precision.table()
    )
    rows = precision.describe(decoder)
    return [f"precision of {row.role}, layers {row.layers}: {row.format}" for row in rows]
