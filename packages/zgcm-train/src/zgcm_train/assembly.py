"""Build the parts of a run, one function per part."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from zgcm_data import Dataset, Loader, LoaderOptions
from zgcm_model import Decoder, initialize, precision
from zgcm_model.parallel import apply_context_parallel, apply_tensor_parallel
from zgcm_optim import Muon, route_parameters, schedule
from zgcm_train._version import __version__
from zgcm_train.checkpoint import Checkpoint, Progress, load_checkpoint
from zgcm_train.checkpoint.progress import Identity
from zgcm_train.config import Recipe
from zgcm_train.errors import CheckpointError, PathError
from zgcm_train.files import sha256_text
from zgcm_train.mesh import Layout, build_layout, default_device
from zgcm_train.pipeline import DecoderStage, Pipeline, PipelineOptions, Place
from zgcm_train.processes import world_size
from zgcm_train.recipe_file import dump_recipe
from zgcm_train.recompute import apply_recompute
from zgcm_train.stage_data import open_stage
from zgcm_train.step import Penalty, StepSettings
from zgcm_train.trainer import Parts


def build_parts(recipe: Recipe, folder: Path, checkpoint: Checkpoint | None) -> Parts:
    """Build everything that the next updates need.

    Args:
        recipe: the effective recipe.
        folder: the run folder.
        checkpoint: where to go on; None starts fresh. A checkpoint at the end of a stage leads into the next one.

    Raises:
        CheckpointError: the checkpoint belongs to another model, dataset or tokenizer.
        PathError: a stage's rows are missing, wrong or too few.
    """
    device = default_device()
    shards = [open_stage(recipe, number) for number in range(len(recipe.stage))]
    identity = build_identity(recipe, shards)
    layout = build_layout(recipe, device)
    decoder = build_decoder(recipe, device, layout)
    optimizer = build_optimizer(recipe, decoder)
    progress = restore(recipe, checkpoint, identity, decoder, optimizer)
    return Parts(
        recipe=recipe,
        decoder=decoder,
        optimizer=optimizer,
        loader=build_loader(recipe, shards[progress.stage], progress.next_row, layout.data_rank),
        schedule=build_schedule(recipe),
        settings=build_settings(recipe, device, layout, decoder),
        progress=progress,
        identity=identity,
        folder=folder,
        layout=layout,
    )


def build_decoder(recipe: Recipe, device: torch.device, layout: Layout) -> Decoder:
    """Build the model without allocating twice, split it, shard it and draw its weights from the run's seed."""
    with torch.device("meta"):
        decoder = Decoder(recipe.model.architecture(), kernel=recipe.model.kernel)
    scaling = recipe.precision.scaling()
    if scaling is not None:
        precision.apply(
            decoder, scaling, backend=recipe.precision.backend, high_precision=recipe.precision.table()
        )
    if layout.tensor is not None:
        apply_tensor_parallel(decoder, layout.tensor, recipe.parallel.sequence_parallel)
    if layout.context is not None:
        apply_context_parallel(decoder, layout.context)
    if recipe.model.compile:
        compile_layers(decoder)
    apply_recompute(decoder, recipe.parallel.recompute)
    if layout.pipeline is not None:
        decoder = DecoderStage(decoder, place_in_pipeline(recipe, layout.pipeline))
    if recipe.precision.gather == "fp8":
        precision.gather_in_fp8(decoder)
    if layout.sharding is not None:
        shard(decoder, layout.sharding, recipe)
    decoder.to_empty(device=device)
    initialize(decoder, recipe.run.seed)
    return decoder.train()


def compile_layers(decoder: Decoder) -> None:
    """Compile each layer by itself, in place: equal layers share their code, and names stay as they are.

    Only what a layer computes is compiled: recomputation and FSDP's hooks come around it.
    """
    if precision.is_applied(decoder):
        # The places of a layer's tensors among the common scales are integers of its own. As constants they would make
        # a program per layer, until the compiler gives up and the rest runs uncompiled.
        torch._dynamo.config.allow_unspec_int_on_nn_module = True
        torch.compiler.config.dynamic_sources = r".*column"
    for block in decoder.blocks():
        object.__setattr__(block, "forward", torch.compile(block.forward))


def place_in_pipeline(recipe: Recipe, mesh: DeviceMesh) -> Place:
    """Return which stage this rank is, and how positions are split between layers."""
    split = recipe.parallel.tp if recipe.parallel.sequence_parallel else 1
    return Place(mesh.get_local_rank(), mesh.size(), split)


def shard(decoder: Decoder, mesh: DeviceMesh, recipe: Recipe) -> None:
    """Shard every block and the rest with FSDP2; gradients are summed, never averaged."""
    reduce = getattr(torch, recipe.precision.reduce)
    # Float32 gradients are float32 on the wire without being told; a policy would only add a cast.
    policy = MixedPrecisionPolicy() if reduce is torch.float32 else MixedPrecisionPolicy(reduce_dtype=reduce)
    modules: list[nn.Module] = [*decoder.layers, decoder]
    for module in modules:
        fsdp = fully_shard(module, mesh=mesh, mp_policy=policy)
        # The loss is divided by the global token count already; a mean over ranks would divide again.
        fsdp.set_gradient_divide_factor(1.0)
        fsdp.set_force_sum_reduction_for_comms(True)
    gather_ahead(decoder.blocks(), recipe.parallel.prefetch)


def gather_ahead(blocks: Sequence[nn.Module], ahead: int) -> None:
    """Let FSDP gather the weights of the next layers while one computes, forward and backward.

    Args:
        blocks: sharded layers, in the order of the forward pass.
        ahead: how many layers; 0 leaves it to FSDP, which looks one ahead in the backward pass only.
    """
    for index, block in enumerate(blocks) if ahead else ():
        assert isinstance(block, FSDPModule)
        block.set_modules_to_forward_prefetch(_sharded(blocks[index + 1 : index + 1 + ahead]))
        block.set_modules_to_backward_prefetch(_sharded(blocks[max(index - ahead, 0) : index][::-1]))


def _sharded(blocks: Sequence[nn.Module]) -> list[FSDPModule]:
    return [block for block in blocks if isinstance(block, FSDPModule)]


def build_optimizer(recipe: Recipe, decoder: Decoder) -> Muon:
    """Build Muon for matrices and Adam for the rest."""
    settings = recipe.optimizer
    return Muon(
        route_parameters(decoder),
        settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        steps=settings.steps,
        coefficients=settings.coefficients,
        scale=settings.scale,
        extra_scale=settings.extra_scale,
        betas=settings.betas,
        eps=settings.eps,
        sharded=settings.sharded,
        dtype=getattr(torch, settings.dtype),
    )


def build_schedule(recipe: Recipe) -> Callable[[int], float]:
    """Return the learning rate as a function of the update number (1-based)."""
    settings, peak, total = recipe.schedule, recipe.optimizer.lr, recipe.total_updates
    if settings.kind == "constant":
        return functools.partial(schedule.constant, peak=peak, warmup=settings.warmup_updates)
    if settings.kind == "cosine":
        return functools.partial(
            schedule.cosine, peak=peak, warmup=settings.warmup_updates, total=total, floor=settings.min_lr
        )
    return functools.partial(
        schedule.warmup_stable_decay,
        peak=peak,
        warmup=settings.warmup_updates,
        total=total,
        decay=settings.decay_updates,
        floor=settings.min_lr,
    )


def build_settings(recipe: Recipe, device: torch.device, layout: Layout, decoder: Decoder) -> StepSettings:
    """Return how an update is computed."""
    return StepSettings(
        compute=getattr(torch, recipe.precision.compute),
        clip_norm=recipe.optimizer.clip_norm,
        isolate_documents=not recipe.data.cross_document_attention,
        device=device,
        group=layout.loss,
        context=layout.context,
        pipeline=build_pipeline(recipe, device, layout, decoder),
        sync_every=recipe.parallel.gradient_sync == "every",
        reduce=getattr(torch, recipe.precision.reduce),
        everyone=dist.group.WORLD if world_size() > 1 else None,
        outliers=build_penalty(recipe, layout),
    )


def build_penalty(recipe: Recipe, layout: Layout) -> Penalty | None:
    """Return the penalty on extreme layer outputs, or None when it is off."""
    settings = recipe.precision
    if not settings.tweo_weight:
        return None
    split = layout.tensor if recipe.parallel.sequence_parallel else None
    return Penalty(settings.tweo_weight, settings.tweo_tau, settings.tweo_power, split)


def build_pipeline(recipe: Recipe, device: torch.device, layout: Layout, decoder: Decoder) -> Pipeline | None:
    """Return what runs the stages, or None for a decoder that is whole."""
    if layout.pipeline is None or not isinstance(decoder, DecoderStage):
        return None
    options = PipelineOptions(
        schedule=recipe.parallel.pipeline_schedule,
        micro_batches=recipe.accumulation,
        shape=(recipe.data.micro_batch, recipe.data.sequence_length // recipe.parallel.cp),
        compute=getattr(torch, recipe.precision.compute),
        device=device,
    )
    return Pipeline(decoder, layout.pipeline, options)


def build_loader(recipe: Recipe, shards: Dataset, next_row: int, data_rank: int) -> Loader:
    """Return this replica's loader, from the stage's next row on; all its ranks read the same rows."""
    return Loader(
        shards,
        global_batch=recipe.data.global_batch,
        dp_rank=data_rank,
        dp_size=recipe.parallel.data_parallel,
        micro_batch=recipe.data.micro_batch,
        start_row=next_row,
        backend=recipe.data.backend,
        options=LoaderOptions(isolate_documents=not recipe.data.cross_document_attention),
    )


def build_identity(recipe: Recipe, shards: list[Dataset]) -> Identity:
    """Return what must not change while the run goes on.

    Raises:
        PathError: the stages were tokenized by different tokenizers.
    """
    tokenizers = {s.manifest.tokenizer_sha256 for s in shards}
    if len(tokenizers) > 1:
        raise PathError("The stages were tokenized by different tokenizers; build them with one.")
    return Identity(
        model=asdict(recipe.model.architecture()),
        data={stage.name: s.manifest.digest for stage, s in zip(recipe.stage, shards, strict=True)},
        tokenizer=tokenizers.pop(),
        recipe=sha256_text(dump_recipe(recipe)),
        code=__version__,
        world=world_size(),
    )


def restore(
    recipe: Recipe, checkpoint: Checkpoint | None, identity: Identity, decoder: Decoder, optimizer: Muon
) -> Progress:
    """Load a checkpoint into the parts and return where the run stands.

    Raises:
        CheckpointError: it belongs to another model, dataset, tokenizer or batch size.
    """
    if checkpoint is None:
        return Progress()
    identity.refuse_mismatch(checkpoint.identity, str(checkpoint.path))
    progress = replace(checkpoint.progress)  # a copy: the checkpoint goes on saying where it stands
    expected = (progress.step - recipe.first_update(progress.stage)) * recipe.data.global_batch
    if progress.next_row != expected:
        raise CheckpointError(
            f"{checkpoint.path} stands at row {progress.next_row} of its stage, this recipe would stand at {expected} "
            f"after {progress.step} updates; restore data.global_batch and stage.updates as they were."
        )
    load_checkpoint(checkpoint, decoder, optimizer, allow_switch=recipe.precision.allow_switch)
    if progress.step == recipe.first_update(progress.stage + 1) and progress.stage + 1 < len(recipe.stage):
        progress.enter_stage(progress.stage + 1)
    return progress
