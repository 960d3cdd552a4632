"""When gradients are reduced, in which type, and what is gathered ahead.

By default a sharded run reduces nothing before the update's last micro-batch, as the published run does: each rank then
holds the whole float32 gradient. ``parallel.gradient_sync = "every"`` holds only a shard: gradients are scattered after
every micro-batch, and between the replicas of HSDP still only after the last.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once here, or every forked rank imports it again
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zgcm_testing import run_ranks
from zgcm_testing.layouts import TOY, Trace, toy_recipe, train_layout, whole
from zgcm_train import Recipe
from zgcm_train.assembly import build_parts
from zgcm_train.step import accumulate_gradients, count_loss_tokens

UNITS = TOY.num_layers + 1  # each layer, and what is left of the decoder


def with_micro_batches(recipe: Recipe, precision: dict[str, Any] | None = None) -> Recipe:
    """Return the recipe with micro-batches of one row."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    values["data"]["micro_batch"] = 1
    values["precision"] |= precision or {}
    return Recipe.model_validate(values)


class Collectives(TorchDispatchMode):
    """Notes the name and the type of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self.seen[func.__name__.split(".")[0].strip("_"), tensors[0].dtype] += 1
        return func(*args, **(kwargs or {}))


def watch_collectives(rank: int, world: int, recipe: Recipe) -> Counter[tuple[str, torch.dtype]]:
    parts = build_parts(recipe, Path("unused"), None)
    batches = list(parts.loader)[: parts.loader.accumulation]
    count = count_loss_tokens(batches, parts.settings)
    with Collectives() as mode:
        accumulate_gradients(parts.decoder, batches, count, parts.settings)
    return mode.seen


def named(seen: Counter[tuple[str, torch.dtype]], part: str) -> int:
    return sum(number for (name, _), number in seen.items() if part in name.replace("_", ""))


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize(
    ("parallel", "world"),
    [
        pytest.param({"dp_shard": 2}, 2, id="fsdp2"),
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, 4, id="hsdp2x2"),
        pytest.param({"dp_replicate": 2}, 2, id="dp2"),
    ],
)
def test_accumulation_saves_the_reduction_on_all_but_the_last_micro_batch(
    data: Path, parallel: dict[str, Any], world: int, sync: str
) -> None:
    recipe = with_micro_batches(toy_recipe(data, {**parallel, "gradient_sync": sync}, isolated=False))
    assert recipe.accumulation == 8 // world
    for counts in run_ranks(watch_collectives, world, recipe):
        scattered = UNITS * (recipe.accumulation if sync == "every" else 1)
        assert named(counts, "reducescatter") == (scattered if parallel.get("dp_shard") else 0)
        # One more adds up the loss.
        assert named(counts, "allreduce") == 1 + (UNITS if parallel.get("dp_replicate") else 0)


def test_a_narrow_wire_reduces_every_micro_batch_between_replicas(data: Path) -> None:
    parallel = {"dp_replicate": 2, "gradient_sync": "every"}
    recipe = with_micro_batches(toy_recipe(data, parallel, isolated=False), {"reduce": "bfloat16"})
    counts = run_ranks(watch_collectives, 2, recipe)[0]
    assert named(counts, "allreduce") == 1 + UNITS * recipe.accumulation


def test_narrow_sums_are_refused(data: Path) -> None:
    with pytest.raises(ValueError, match=r'set parallel\.gradient_sync "every"'):
        with_micro_batches(toy_recipe(data, {"dp_shard": 2}, isolated=False), {"reduce": "bfloat16"})


def first_gradients(rank: int, world: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    parts = build_parts(recipe, Path("unused"), None)
    batches = list(parts.loader)[: parts.loader.accumulation]
    accumulate_gradients(parts.decoder, batches, 100, parts.settings)
    return whole(parts.decoder, gradients=True)


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_gradients_travel_in_the_declared_type(data: Path, reduce: str) -> None:
    parallel = {"dp_shard": 2, "gradient_sync": "every"}
    exact = with_micro_batches(toy_recipe(data, {}, isolated=False))
    recipe = with_micro_batches(toy_recipe(data, parallel, isolated=False), {"reduce": reduce})
    seen = run_ranks(watch_collectives, 2, recipe)[0]
    assert {dtype for name, dtype in seen if "reducescatter" in name.replace("_", "")} == {
        getattr(torch, reduce)
    }
    expected, got = (run_ranks(first_gradients, r.parallel.devices, r)[0] for r in (exact, recipe))
    largest = max(float(g.abs().max()) for g in expected.values())
    worst = max(float((got[name] - expected[name]).abs().max()) for name in expected) / largest
    assert got["norm.weight"].dtype == torch.float32
    if reduce == "float32":
        assert worst < 1e-5
    else:
        assert 1e-5 < worst < 1e-2


def sum_tiny_gradients(rank: int, world: int, recipe: Recipe) -> tuple[float, torch.dtype]:
    parts = build_parts(recipe, Path("unused"), None)
    batch = next(iter(parts.loader))
    batches = [batch] * 64
    accumulate_gradients(parts.decoder, batches[:1], 10**6, parts.settings)
    once = whole(parts.decoder, gradients=True)
    for parameter in parts.decoder.parameters():
        parameter.grad = None
    accumulate_gradients(parts.decoder, batches, 10**6, parts.settings)
    total = whole(parts.decoder, gradients=True)
    worst = max(float((total[n] - 64 * g).norm() / (64 * g).norm()) for n, g in once.items())
    return worst, total["norm.weight"].dtype


@pytest.mark.parametrize(
    ("parallel", "precision"),
    [
        pytest.param({}, {"compute": "bfloat16"}, id="alone"),
        pytest.param({"dp_shard": 2}, {"compute": "bfloat16"}, id="last"),
        pytest.param({"dp_shard": 2, "gradient_sync": "every"}, {"compute": "bfloat16"}, id="every"),
        pytest.param(
            {"dp_replicate": 2, "gradient_sync": "every"}, {"reduce": "bfloat16"}, id="narrow-replicas"
        ),
    ],
)
def test_t24_many_tiny_gradients_are_summed_in_float32(
    data: Path, parallel: dict[str, Any], precision: dict[str, str]
) -> None:
    recipe = with_micro_batches(toy_recipe(data, parallel, isolated=False), precision)
    worst, dtype = run_ranks(sum_tiny_gradients, recipe.parallel.devices, recipe)[0]
    assert dtype == torch.float32
    # Sixty-four equal terms summed in bfloat16 would be off by several per cent.
    assert worst < 1e-3


def watch_gathers(rank: int, world: int, recipe: Recipe) -> list[tuple[str, int]]:
    parts = build_parts(recipe, Path("unused"), None)
    blocks, events = parts.decoder.blocks(), []
    for number, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        group = block._get_fsdp_state()._fsdp_param_groups[0]
        unshard = group.unshard

        def noted(*args: Any, number: int = number, unshard: Any = unshard, **kwargs: Any) -> Any:
            events.append(("gather", number))
            return unshard(*args, **kwargs)

        group.unshard = noted
        block.feed_forward.register_forward_pre_hook(
            lambda module, args, number=number: events.append(("compute", number))
        )
    with torch.no_grad():
        parts.decoder(torch.zeros(1, 8, dtype=torch.int64))
    return events


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_weights_are_gathered_as_far_ahead_as_asked(data: Path, ahead: int) -> None:
    recipe = toy_recipe(data, {"dp_shard": 2, "prefetch": ahead}, isolated=False)
    events = run_ranks(watch_gathers, 2, recipe)[0]
    before = [number for kind, number in events[: events.index(("compute", 0))] if kind == "gather"]
    assert sorted(set(before)) == list(range(1 + ahead))


def replicated_head_norms(rank: int, world: int, recipe: Recipe) -> list[str]:
    parts = build_parts(recipe, Path("unused"), None)
    batches = list(parts.loader)[: parts.loader.accumulation]
    accumulate_gradients(parts.decoder, batches, 100, parts.settings)
    wrong = []
    for name, parameter in parts.decoder.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        if gradient.placements[0].is_replicate():
            mine = gradient.to_local()
            first = mine.clone()
            dist.broadcast(first, 0)
            wrong += [] if torch.equal(first, mine) else [name]
    return wrong


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_weights_kept_whole_are_equal_on_all_tensor_parallel_ranks(
    data: Path, sequence_parallel: bool
) -> None:
    parallel = {"tp": 2, "sequence_parallel": sequence_parallel}
    recipe = toy_recipe(data, parallel, isolated=False)
    assert run_ranks(replicated_head_norms, 2, recipe) == [[], []]


def compiled(rank: int, world: int, recipe: Recipe) -> tuple[Trace, int]:
    torch._dynamo.utils.counters.clear()
    trace = train_layout(recipe)
    return trace, torch._dynamo.utils.counters["frames"]["ok"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "world"), [({"dp_shard": 2, "recompute": "full"}, 2), ({"cp": 2}, 2)], ids=["fsdp2", "cp2"]
)
def test_compiled_layers_equal_eager_ones(data: Path, parallel: dict[str, Any], world: int) -> None:
    eager = toy_recipe(data, parallel, isolated=True)
    values = eager.model_dump(mode="json", exclude_none=True)
    values["model"]["compile"] = True
    (plain, none), (fast, frames) = (
        run_ranks(compiled, world, r, timeout=400)[0] for r in (eager, Recipe.model_validate(values))
    )
    assert none == 0
    assert frames >= 2  # a window layer and a global one
    assert fast.initial.keys() == plain.initial.keys()
    assert fast.losses == pytest.approx(plain.losses, abs=1e-4)
    for name, weight in plain.weights[10].items():
        torch.testing.assert_close(fast.weights[10][name], weight, atol=1e-4, rtol=0)
