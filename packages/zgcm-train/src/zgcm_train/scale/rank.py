"""One rank of a run of any size, measured in one process.

The model is built, sharded and stepped by the functions that a real process uses. Attention is replaced by what a
fused kernel allocates; everything else is counted as PyTorch runs it eagerly, so a compiled block may need less. FP8 is
counted as ``scaled_mm`` runs it, also where Transformer Engine is to compute.
Numbers that the step reads from tensors are taken as 1 and every target counts. Two micro-batches are run, a first
and a last one; the traffic of the first stands for all that are not the last. A pipeline runs all of them. The
process itself needs little memory: fake tensors have no storage.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from zgcm_data import Batch
from zgcm_model import Decoder
from zgcm_model.kernels.registry import AutoKernel
from zgcm_train.assembly import build_decoder, build_optimizer, build_settings
from zgcm_train.config import Recipe
from zgcm_train.mesh import build_layout
from zgcm_train.scale.attention import FusedShapes
from zgcm_train.scale.measure import RankMeasure
from zgcm_train.scale.sums import axis_sizes, micro_batches_run, place_of, traffic_of
from zgcm_train.scale.watch import StepWatch
from zgcm_train.step import train_step


def measure_rank(recipe: Recipe, rank: int) -> RankMeasure:
    """Assemble one rank of a recipe without its machines and make one update.

    Args:
        recipe: the effective recipe.
        rank: below ``recipe.parallel.devices``.

    Returns:
        Its shapes, memory and traffic.

    Raises:
        ConfigurationError: the mesh does not fit the model or the rows.
        ValueError: this process is part of a real run.
    """
    device, recipe = torch.device("cpu"), _as_it_runs(recipe)
    with _fake_world(rank, recipe.parallel.devices):
        layout = build_layout(recipe, device)
        with FakeTensorMode(allow_non_fake_inputs=True), StepWatch() as watch:
            decoder = build_decoder(recipe, device, layout)
            _attend_in_shapes_only(decoder)
            optimizer = build_optimizer(recipe, decoder)
            settings = build_settings(recipe, device, layout, decoder)
            watch.begin(decoder, optimizer, whole_gradients=recipe.parallel.pp > 1)
            train_step(decoder, optimizer, [_batch(recipe)] * micro_batches_run(recipe), settings)
            shapes = {name: _local_shape(p) for name, p in decoder.named_parameters()}
            memory = watch.memory_use()
    place = place_of(rank, axis_sizes(recipe))
    return RankMeasure(rank, place, shapes, memory, traffic_of(watch.events, recipe))


def _local_shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple((parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape)


@contextmanager
def _fake_world(rank: int, devices: int) -> Iterator[None]:
    if dist.is_initialized():
        raise ValueError("this process is part of a run; measure a rank in a process of its own")
    # Importing it makes the backend "fake" known, whose collectives return at once.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=devices)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _as_it_runs(recipe: Recipe) -> Recipe:
    model = recipe.model.model_copy(update={"kernel": "auto", "compile": False})
    precision = recipe.precision.model_copy(update={"backend": "scaled_mm"})
    return recipe.model_copy(update={"model": model, "precision": precision})


def _attend_in_shapes_only(decoder: Decoder) -> None:
    kernel = decoder.kernel
    assert isinstance(kernel, AutoKernel)
    kernel.picked = FusedShapes()


def _batch(recipe: Recipe) -> Batch:
    rows, length = recipe.data.micro_batch, recipe.data.sequence_length
    nothing = torch.zeros(0, dtype=torch.int64)
    return Batch(
        tokens=torch.zeros(rows, length + 1, dtype=torch.int64),
        loss_mask=torch.ones(rows, length, dtype=torch.bool),
        document_ids=torch.zeros(rows, length, dtype=torch.int64),
        rows=torch.zeros(rows, dtype=torch.int64),
        source_tokens=nothing,
        source_loss_tokens=nothing,
        source_documents=nothing,
        source_rows=nothing,
    )
