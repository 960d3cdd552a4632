"""Sharded equals unsharded, at 2, 3 and 4 gloo ranks, for every layout of DTensor parameters."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once here, or every forked rank imports it again
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from zgcm_optim import Muon, clip_grad_norm_, count_operations, exchange, route_parameters
from zgcm_optim.exchange import count_traffic
from zgcm_testing import assert_sharded_equal, run_ranks

# Rows that divide by 2, 3 and 4, rows that do not, and rows that leave ranks empty.
SHAPES = [(12, 8), (7, 10), (2, 9), (13, 4), (12, 8), (3, 3), (1, 5), (24, 36)]

LAYOUTS: dict[str, tuple[tuple[str, ...], list[Any]]] = {
    "fsdp": (("dp",), [Shard(0)]),
    "fsdp by columns": (("dp",), [Shard(1)]),
    "tp rows": (("tp",), [Shard(0)]),
    "tp columns": (("tp",), [Shard(1)]),
    "replicated": (("dp",), [Replicate()]),
    "hsdp": (("replica", "shard"), [Replicate(), Shard(0)]),
    "shard then replicate": (("a", "b"), [Shard(0), Replicate()]),
    "rows and columns": (("dp", "tp"), [Shard(0), Shard(1)]),
    "rows twice": (("a", "b"), [Shard(0), Shard(0)]),
    "replicated twice": (("a", "b"), [Replicate(), Replicate()]),
}
SIZES = {1: {2: (2,), 3: (3,), 4: (4,)}, 2: {2: (2, 1), 3: (1, 3), 4: (2, 2)}}


def matrices(seed: int, shapes: list[tuple[int, int]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def unsharded(settings: dict, steps: int, groups: Any = None) -> list[Tensor]:
    params = [nn.Parameter(matrix) for matrix in matrices(0)]
    optimizer = Muon(groups(params) if groups else params, 0.02, **settings)
    for step in range(steps):
        for parameter, gradient in zip(params, matrices(100 + step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in params]


def run_layout(
    rank: int, world: int, layout: str, settings: dict, expected: list[Tensor], groups: Any
) -> None:
    names, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", SIZES[len(names)][world], mesh_dim_names=names)
    params = [nn.Parameter(distribute_tensor(matrix, mesh, placements)) for matrix in matrices(0)]
    optimizer = Muon(groups(params) if groups else params, 0.02, **settings)
    for step in range(10):
        for parameter, gradient in zip(params, matrices(100 + step), strict=True):
            parameter.grad = distribute_tensor(gradient, mesh, placements)
        optimizer.step()
    for parameter, whole in zip(params, expected, strict=True):
        assert_sharded_equal(parameter, whole, atol=1e-5)


def run_layouts(rank: int, world: int, settings: dict, expected: list[Tensor]) -> str:
    for layout in LAYOUTS:
        try:
            run_layout(rank, world, layout, settings, expected, None)
        except Exception as error:
            error.add_note(f"layout: {layout}")
            raise
    return "all layouts"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_layout_equals_unsharded_over_ten_steps(world: int) -> None:
    settings = {"dtype": torch.float32, "nesterov": world != 3}
    assert run_ranks(run_layouts, world, settings, unsharded(settings, 10)) == ["all layouts"] * world


@pytest.mark.parametrize("layout", ["fsdp", "rows and columns", "hsdp"])
def test_sharded_equals_unsharded_in_bfloat16(layout: str) -> None:
    run_ranks(run_layout, 4, layout, {}, unsharded({}, 10), None)


def _fused(params: list[nn.Parameter]) -> list[dict]:
    """Give some parameters kinds of rows, others columns, others an algorithm and a rate of their own."""
    return [
        {"params": [params[0], params[4]], "blocks": (3, 1, 2), "scale": "shape"},
        {"params": [params[1]], "blocks": 2, "block_dim": 1},
        {"params": [params[2], params[3]], "algorithm": "adam", "lr": 0.01},
        {"params": params[5:], "lr": 0.03, "weight_decay": 0.0, "momentum": 0.5},
    ]


@pytest.mark.parametrize("layout", ["fsdp", "tp columns", "rows and columns"])
def test_blocks_and_groups_are_exact_under_sharding(layout: str) -> None:
    settings = {"dtype": torch.float32}
    run_ranks(
        run_layout, 3 if layout == "fsdp" else 4, layout, settings, unsharded(settings, 10, _fused), _fused
    )


# --- FSDP2, tensor parallelism and both, on a model with real gradients -------------------------------------


def build() -> nn.Sequential:
    torch.manual_seed(3)
    sizes = [(6, 10), (10, 7), (7, 12), (12, 3)]
    layers = [nn.Linear(a, b, bias=False) for a, b in sizes]
    return nn.Sequential(nn.Embedding(5, 6), layers[0], nn.LayerNorm(10), *layers[1:])


TOKENS = torch.arange(20).reshape(4, 5) % 5


def train(model: nn.Module, optimizer: Muon, steps: int, limit: float) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(TOKENS).square().sum() - model(TOKENS).sum()
        loss.backward()
        losses.append(loss.item())
        losses.append(clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
    return losses


def parallelize(model: nn.Sequential, kind: str, world: int) -> nn.Sequential:
    if kind == "fsdp":
        return _shard(model, init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    if kind == "hsdp":
        return _shard(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard")))
    names = ("dp", "tp") if kind == "fsdp over tp" else ("tp",)
    mesh = init_device_mesh(
        "cpu", (world // 2, 2) if kind == "fsdp over tp" else (world,), mesh_dim_names=names
    )
    plan = {"3": ColwiseParallel(output_layouts=Replicate()), "4": ColwiseParallel(), "5": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return _shard(model, mesh["dp"]) if kind == "fsdp over tp" else model


def _shard(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run_model(rank: int, world: int, kind: str, losses: list[float], weights: list[Tensor]) -> None:
    warnings.simplefilter("ignore")
    model = parallelize(build(), kind, world)
    optimizer = Muon(route_parameters(model), 0.01, dtype=torch.float32)
    found = train(model, optimizer, 10, 0.7)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), atol=1e-4, rtol=1e-4)
    for parameter, whole in zip(model.parameters(), weights, strict=True):
        assert_sharded_equal(parameter, whole, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("fsdp", 2),
        ("fsdp", 3),
        ("fsdp", 4),
        ("hsdp", 4),
        ("tp", 2),
        ("tp", 3),
        ("tp", 4),
        ("fsdp over tp", 4),
    ],
)
def test_fsdp2_and_tensor_parallel_training_equals_one_process(kind: str, world: int) -> None:
    model = build()
    losses = train(model, Muon(route_parameters(model), 0.01, dtype=torch.float32), 10, 0.7)
    run_ranks(run_model, world, kind, losses, [parameter.detach() for parameter in model.parameters()])


# --- blockwise -------------------------------------------------------------------------------------------------


BLOCKWISE: dict[str, tuple[tuple[int, int], dict]] = {
    "rows": ((8, 6), {"blocks": 2}),
    "columns": ((5, 10), {"blocks": 2, "block_dim": 1}),
    "neither": ((9, 4), {}),
}


def cut(name: str, mesh: Any) -> list[Any]:
    """Return placements as FSDP2 leaves them: tensor parallel first, then data parallel over rows."""
    tensor = {"rows": Shard(0), "columns": Shard(1), "neither": Replicate()}[name]
    if mesh.ndim == 1:
        return [tensor]
    return [_StridedShard(0, split_factor=2) if name == "rows" else Shard(0), tensor]


def run_blockwise(rank: int, world: int, expected: dict[str, Tensor]) -> None:
    sizes, names = ((2,), ("tp",)) if world == 2 else ((2, 2), ("dp", "tp"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for number, (name, (shape, _)) in enumerate(BLOCKWISE.items()):
        weight, gradient = matrices(number, [shape, shape])
        parameter = nn.Parameter(distribute_tensor(weight, mesh, cut(name, mesh)))
        optimizer = Muon([parameter], 0.1, sharded="blockwise", dtype=torch.float32)
        for _ in range(3):
            parameter.grad = distribute_tensor(gradient, mesh, cut(name, mesh))
            optimizer.step()
        assert_sharded_equal(parameter, expected[name], atol=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_blockwise_equals_blocks_on_one_device(world: int) -> None:
    expected = {}
    for number, (name, (shape, blocks)) in enumerate(BLOCKWISE.items()):
        weight, gradient = matrices(number, [shape, shape])
        parameter = nn.Parameter(weight)
        optimizer = Muon([{"params": [parameter], **blocks}], 0.1, dtype=torch.float32)
        for _ in range(3):
            parameter.grad = gradient
            optimizer.step()
        expected[name] = parameter.detach()
    run_ranks(run_blockwise, world, expected)


def run_blockwise_kinds(rank: int, world: int, expected: Tensor) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight, gradient = matrices(0, [(24, 5), (24, 5)])
    parameter = nn.Parameter(distribute_tensor(weight, mesh, cut("rows", mesh)))
    group = {"params": [parameter], "blocks": (2, 2, 1, 1), "scale": "shape"}
    optimizer = Muon([group], 0.1, sharded="blockwise", dtype=torch.float32)
    for _ in range(3):
        parameter.grad = distribute_tensor(gradient, mesh, cut("rows", mesh))
        optimizer.step()
    assert_sharded_equal(parameter, expected, atol=1e-5)


def test_blockwise_splits_fused_kinds_inside_each_shard() -> None:
    weight, gradient = matrices(0, [(24, 5), (24, 5)])
    halves = [nn.Parameter(half.clone()) for half in weight.chunk(2)]
    groups = [{"params": halves, "blocks": (2, 2, 1, 1), "scale": "shape"}]
    optimizer = Muon(groups, 0.1, dtype=torch.float32)
    for _ in range(3):
        for half, part in zip(halves, gradient.chunk(2), strict=True):
            half.grad = part
        optimizer.step()
    run_ranks(run_blockwise_kinds, 4, torch.cat([half.detach() for half in halves]))


def run_blockwise_errors(rank: int, world: int) -> None:
    unnamed = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), unnamed, [Shard(0)]))
    with pytest.raises(ValueError, match="mesh_dim_names"):
        Muon([parameter], 0.1, sharded="blockwise")
    Muon([parameter], 0.1, sharded="blockwise", tensor_axes=())
    named = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    inside = nn.Parameter(distribute_tensor(torch.ones(4, 4), named, [Shard(0), Shard(0)]))
    with pytest.raises(ValueError, match="before FSDP"):
        Muon([inside], 0.1, sharded="blockwise")
    with pytest.raises(ValueError, match="blocks"):
        Muon([{"params": [inside], "blocks": 3}], 0.1)


def test_blockwise_refuses_what_it_cannot_see() -> None:
    run_ranks(run_blockwise_errors, 2)


# --- work and traffic ------------------------------------------------------------------------------------------

WORK = [(24, 16), (24, 16), (8, 40), (16, 16), (12, 30), (24, 16), (40, 8), (20, 20), (16, 24), (8, 8)]


def run_counted(rank: int, world: int, kind: str) -> tuple[int, int, int]:
    names, placements = LAYOUTS[kind]
    mesh = init_device_mesh("cpu", SIZES[len(names)][world], mesh_dim_names=names)
    params = [nn.Parameter(distribute_tensor(matrix, mesh, placements)) for matrix in matrices(0, WORK)]
    for parameter, gradient in zip(params, matrices(1, WORK), strict=True):
        parameter.grad = distribute_tensor(gradient, mesh, placements)
    optimizer = Muon(params, 0.1, dtype=torch.float32, tensor_parallel="gather")
    with count_operations() as work, count_traffic() as traffic:
        optimizer.step()
    return work.flops, traffic.sent, sum(p.to_local().numel() * 4 for p in params)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "rows and columns", "replicated"])
def test_ranks_share_the_work_of_one_and_send_their_shard_at_most_twice(kind: str, world: int) -> None:
    params = [nn.Parameter(matrix) for matrix in matrices(0, WORK)]
    each = []
    for parameter, gradient in zip(params, matrices(1, WORK), strict=True):
        parameter.grad = gradient
        with count_operations() as work:
            Muon([parameter], 0.1, dtype=torch.float32).step()
        each.append(work.flops)
    counted = run_ranks(run_counted, world, kind)
    assert sum(flops for flops, _, _ in counted) == sum(each)
    assert max(flops for flops, _, _ in counted) <= sum(each) / world + max(each)
    largest = max(rows * columns * 4 for rows, columns in WORK)
    for _, sent, shard in counted:
        assert sent <= 2 * shard + largest
    assert sum(sent for _, sent, _ in counted) <= 2 * sum(shard for _, _, shard in counted)


def run_recorded(rank: int, world: int) -> list[tuple[str, int]]:
    calls: list[tuple[str, int]] = []

    def record(name: str, original: Any) -> Any:
        def wrapped(self: Any, number: int, *args: Any) -> Any:
            calls.append((name, number))
            return original(self, number, *args)

        return wrapped

    for name in ("_gather", "_orthogonalize", "_return", "_apply"):
        setattr(exchange.Exchange, name, record(name, getattr(exchange.Exchange, name)))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])) for _ in range(16)]
    for parameter in params:
        parameter.grad = distribute_tensor(torch.eye(4), mesh, [Shard(0)])
    Muon(params, 0.1).step()
    return calls


def test_exchanges_are_under_way_while_other_matrices_are_computed() -> None:
    calls = run_ranks(run_recorded, 2)[0]
    rounds = 1 + max(number for _, number in calls)
    assert rounds == 4
    for number in range(rounds - 1):
        assert calls.index(("_gather", number + 1)) < calls.index(("_orthogonalize", number))
        assert calls.index(("_orthogonalize", number + 1)) < calls.index(("_apply", number))


def run_part(rank: int, world: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part, used = mesh["tp"], []
    if rank >= 2:
        return used
    exchange_, reduce_ = dist.all_to_all_single, dist.all_reduce

    def recorded(original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            used.append(dist.get_process_group_ranks(kwargs["group"]))
            return original(*args, **kwargs)

        return collective

    params = [nn.Parameter(distribute_tensor(m, part, [Shard(0)], src_data_rank=None)) for m in matrices(0)]
    dist.all_to_all_single, dist.all_reduce = recorded(exchange_), recorded(reduce_)
    for way in ("gather", "gram"):
        optimizer = Muon(params, 0.1, tensor_parallel=way)
        for parameter, gradient in zip(params, matrices(1), strict=True):
            parameter.grad = distribute_tensor(gradient, part, [Shard(0)], src_data_rank=None)
        optimizer.step()
    dist.all_to_all_single, dist.all_reduce = exchange_, reduce_
    return used


def test_only_the_ranks_of_the_mesh_take_part_and_nothing_is_global() -> None:
    used = run_ranks(run_part, 4)
    assert used[0]
    assert used[0] == used[1] == [[0, 1]] * len(used[0])
    assert not used[2]
    assert not used[3]


# --- saving at one number of ranks and loading at another ------------------------------------------------------


def run_save(rank: int, world: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    model = parallelize(build(), "fsdp", world)
    optimizer = Muon(route_parameters(model), 0.01, dtype=torch.float32)
    train(model, optimizer, 3, 0.7)
    dcp.save(
        {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=folder,
    )


def run_load(rank: int, world: int, folder: str, kind: str, weights: list[Tensor]) -> None:
    warnings.simplefilter("ignore")
    model = parallelize(build(), kind, world)
    optimizer = Muon(list(reversed(route_parameters(model))), 5.0, dtype=torch.float32)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    assert all(group["lr"] == 0.01 for group in optimizer.param_groups)
    train(model, optimizer, 3, 0.7)
    for parameter, whole in zip(model.parameters(), weights, strict=True):
        assert_sharded_equal(parameter, whole, atol=1e-5)


@pytest.mark.parametrize("kind", ["fsdp", "fsdp over tp"])
def test_save_at_two_ranks_and_load_at_four(tmp_path: Path, kind: str) -> None:
    model = build()
    train(model, Muon(route_parameters(model), 0.01, dtype=torch.float32), 6, 0.7)
    run_ranks(run_save, 2, str(tmp_path))
    run_ranks(run_load, 4, str(tmp_path), kind, [parameter.detach() for parameter in model.parameters()])


# --- clipping --------------------------------------------------------------------------------------------------


def run_clip(rank: int, world: int, whole: list[Tensor], limit: float) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = [
        (mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        (mesh, [Shard(0), Shard(1)]),
        (mesh["dp"], [Shard(0)]),
        (mesh["tp"], [Replicate()]),
        (mesh, [Replicate(), Replicate()]),
    ]
    params = []
    for gradient, (part, places) in zip(whole, placements, strict=True):
        params.append(nn.Parameter(distribute_tensor(torch.zeros_like(gradient), part, places)))
        params[-1].grad = distribute_tensor(gradient.clone(), part, places)
    # A partial gradient counts by its sum; sequence parallelism leaves such gradients on norm weights.
    params[3].grad = DTensor.from_local(whole[3] / 2, mesh["tp"], [Partial()])
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.ones(3)
    expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in [*whole, torch.ones(3)]]))
    norm = clip_grad_norm_([*params, plain], limit)
    torch.testing.assert_close(norm, expected)
    factor = min(1.0, limit / (expected.item() + 1e-6))
    for parameter, gradient in zip(params, whole, strict=True):
        assert_sharded_equal(parameter.grad, gradient * factor, atol=1e-6)
    if rank == 1:
        params[0].grad.to_local().fill_(math.inf)
    assert torch.isinf(clip_grad_norm_(params, math.inf))
    with pytest.raises(RuntimeError, match="gradient norm"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_counts_each_element_once_over_mixed_meshes(limit: float) -> None:
    run_ranks(run_clip, 4, matrices(0, [(8, 6), (6, 7), (5, 4), (3, 3), (2, 2)]), limit)


def run_copy(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    twin = copy.deepcopy(Muon([parameter], 0.1))
    for group in twin.param_groups:
        for one in group["params"]:
            one.grad = distribute_tensor(torch.eye(4), mesh, [Shard(0)])
    twin.step()
    assert dist.is_initialized()


def test_a_copied_optimizer_still_steps() -> None:
    run_ranks(run_copy, 2)
