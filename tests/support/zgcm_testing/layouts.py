"""Train a toy model under any layout, for tests that compare layouts with one process.

The model has window layers that reach over a context-parallel cut and a global one; masks leave out most of the first
half of two rows in three, so that ranks count different numbers of tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgcm_data import Batch
from zgcm_model import ModelConfig
from zgcm_model import config as model_config
from zgcm_model.sharding import local_part
from zgcm_testing.tiny_runs import VOCABULARY, tiny_recipe
from zgcm_train import Recipe
from zgcm_train.assembly import build_parts
from zgcm_train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from zgcm_train.checkpoint.tensors import collect_tensors
from zgcm_train.processes import of_all
from zgcm_train.replicas import differing_replicas
from zgcm_train.step import accumulate_gradients, apply_update, count_loss_tokens
from zgcm_train.trainer import Parts

UPDATES, SAVED = 10, 5
PRESET = "layouts"
TOY = ModelConfig(VOCABULARY + 7, 16, 24, 3, 4, 4, 8, window=5, global_every=2, max_positions=64)


@dataclass
class Trace:
    """What a run under one layout did; tensors are whole.

    Attributes:
        losses: mean loss of each update.
        norms: gradient norm of each update.
        counts: loss tokens of each update.
        initial: weights before the first update.
        gradients: of the first update, before clipping.
        weights: after some updates, by their number.
        differing: names of weights whose copies differ, before the first and after the last update.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)


def toy_recipe(data: Path, parallel: dict[str, Any], *, isolated: bool) -> Recipe:
    """Return a recipe of ten updates of eight rows in two micro-batches per replica."""
    model_config.PRESETS[PRESET] = TOY
    replicas = parallel.get("dp_replicate", 1) * parallel.get("dp_shard", 1)
    shapes = {"global_batch": 8, "micro_batch": 4 // replicas, "cross_document_attention": not isolated}
    values = tiny_recipe(data, parallel=parallel, data=shapes).model_dump(mode="json", exclude_none=True)
    values["model"] = {"preset": PRESET, "kernel": "reference"}
    values["stage"] = [values["stage"][0] | {"updates": UPDATES}]
    return Recipe.model_validate(values | {"eval": {}})


def ragged(batch: Batch) -> Batch:
    """Leave out of the loss most of the first half of two rows in three, and end a document every seven tokens."""
    position = torch.arange(batch.loss_mask.shape[1])
    hidden = (position < batch.loss_mask.shape[1] // 2) & (position % 8 > 0)
    return replace(
        batch,
        loss_mask=batch.loss_mask & ~(hidden & (batch.rows[:, None] % 3 > 0)),
        document_ids=batch.document_ids * 100 + position // 7,
    )


def updates(parts: Parts) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each update."""
    batches = [ragged(batch) for batch in parts.loader]
    for start in range(0, len(batches), parts.loader.accumulation):
        yield batches[start : start + parts.loader.accumulation]


def train_parts(parts: Parts, trace: Trace, *, keep: tuple[int, ...], limit: int = UPDATES) -> None:
    """Make at most ``limit`` updates and note what they did."""
    for batches in list(updates(parts))[:limit]:
        parts.progress.step += 1
        for group in parts.optimizer.param_groups:
            group["lr"] = parts.schedule(parts.progress.step)
        count = count_loss_tokens(batches, parts.settings)
        loss = accumulate_gradients(parts.decoder, batches, count, parts.settings)
        if parts.progress.step == 1:
            trace.gradients = whole(parts.decoder, gradients=True)
        pipeline = parts.settings.pipeline
        norm, _ = apply_update(
            parts.optimizer, parts.settings.clip_norm, loss, None if pipeline is None else pipeline.group
        )
        trace.losses.append(loss / count)
        trace.norms.append(norm)
        trace.counts.append(count)
        if parts.progress.step in keep:
            trace.weights[parts.progress.step] = whole(parts.decoder)


def train_layout(recipe: Recipe, save: Path | None = None) -> Trace:
    """Train under a recipe's layout from the seed, and save a checkpoint on the way if asked to."""
    parts = build_parts(recipe, Path("unused"), None)
    trace = Trace(initial=whole(parts.decoder), differing=differing_replicas(parts.decoder))
    train_parts(parts, trace, keep=(), limit=SAVED)
    parts.progress.next_row = SAVED * recipe.data.global_batch
    if save is not None:
        save_checkpoint(save, parts.decoder, parts.optimizer, parts.progress, parts.identity)
    parts.loader.load_state_dict(parts.loader.state_dict() | {"next_row": parts.progress.next_row})
    train_parts(parts, trace, keep=(SAVED + 1, UPDATES), limit=UPDATES - SAVED)
    trace.differing += differing_replicas(parts.decoder)
    return trace


def resume_layout(recipe: Recipe, saved: Checkpoint) -> Trace:
    """Make one update from a checkpoint, under a recipe's layout."""
    trace = Trace()
    parts = build_parts(recipe, Path("unused"), saved)
    train_parts(parts, trace, keep=(SAVED + 1,), limit=1)
    return trace


def whole(model: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """Return every weight or gradient by name, gathered over shards and pipeline stages."""
    mine = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if gradients else parameter.detach()
        assert value is not None, name
        mine[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    joined: dict[str, Tensor] = {}
    for part in of_all(mine):
        joined |= part
    return joined


def load_differences(recipe: Recipe, saved: list[Checkpoint], expected: list[dict[str, Tensor]]) -> list[str]:
    """Load checkpoints one after the other into one layout and name what is not bitwise what was saved.

    Args:
        recipe: its layout takes the checkpoints.
        saved: checkpoints.
        expected: whole tensors of each, by name, read by one process.
    """
    parts = build_parts(recipe, Path("unused"), None)
    wrong = []
    for checkpoint, tensors in zip(saved, expected, strict=True):
        load_checkpoint(checkpoint, parts.decoder, parts.optimizer)
        for name, value in collect_tensors(parts.decoder, parts.optimizer).items():
            if name.startswith("rng."):
                continue
            mine = value.to_local() if isinstance(value, DTensor) else value
            part = local_part(tensors[name], value) if isinstance(value, DTensor) else tensors[name]
            if not torch.equal(mine, part):
                wrong.append(f"{checkpoint.path.parent.name}: {name}")
    return wrong


def read_whole(recipe: Recipe, saved: Checkpoint) -> dict[str, Tensor]:
    """Read a checkpoint on one process and return its tensors by name."""
    parts = build_parts(recipe, Path("unused"), None)
    load_checkpoint(saved, parts.decoder, parts.optimizer)
    tensors = collect_tensors(parts.decoder, parts.optimizer)
    return {name: value.clone() for name, value in tensors.items() if not name.startswith("rng.")}
