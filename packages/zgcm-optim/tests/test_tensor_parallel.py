"""Matrices whose long side is cut over tensor-parallel ranks: gathered, or iterated on together."""

import math
from typing import Any

import pytest
import torch
import torch._dynamo  # once here, or every forked rank imports it again
import torch.distributed as dist
from optim_reference import orthogonal
from test_orthogonalize import STEPS, error, random, spectra, with_spectrum
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from zgcm_optim import TABLES, Muon, count_operations
from zgcm_optim.coefficients import resolve
from zgcm_optim.costs import (
    TensorCut,
    all_reduce_bytes,
    choose_method,
    choose_tensor_parallel,
    distributed_operations,
    operations,
)
from zgcm_optim.exchange import count_traffic
from zgcm_optim.gram import apply_polynomial, carrier, magnitude, packed_gram, polynomials, unpacked
from zgcm_optim.gram_exchange import GramExchange
from zgcm_optim.layout import region_of
from zgcm_testing import run_ranks

# Long sides that divide by 2, 3 and 4, that do not, and that leave ranks empty; equal shapes and lone ones.
SHAPES = [(12, 8), (7, 10), (2, 9), (13, 4), (12, 8), (3, 3), (1, 5), (24, 36), (40, 6), (8, 12)]

TP = ("tp",)
BOTH = ("dp", "tp")
# As FSDP2 leaves them when it is applied after tensor parallelism.
FSDP_ROWS = [_StridedShard(0, split_factor=2), Shard(0)]
FSDP_COLUMNS = [Shard(0), Shard(1)]
LAYOUTS: dict[str, tuple[tuple[str, ...], list[Any]]] = {
    "rows": (TP, [Shard(0)]),
    "columns": (TP, [Shard(1)]),
    "fsdp over rows": (BOTH, FSDP_ROWS),
    "fsdp over columns": (BOTH, FSDP_COLUMNS),
    "replicated rows": (BOTH, [Replicate(), Shard(0)]),
}


def matrices(seed: int, shapes: list[tuple[int, int]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def sharded(seed: int, shapes: list[tuple[int, int]], layout: str, world: int) -> list[Tensor]:
    names, placements = LAYOUTS[layout]
    sizes = (world,) if names == TP else (world // 2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return [place(matrix, mesh, placements) for matrix in matrices(seed, shapes)]


def place(matrix: Tensor, mesh: DeviceMesh, placements: list[Any]) -> Tensor:
    """Cut a matrix by hand: torch does not distribute uneven strided shards, but FSDP2 makes them."""
    region = region_of(matrix.shape, tuple(mesh.shape), placements, mesh.get_coordinate())
    part = region.of(matrix).contiguous()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=matrix.shape, stride=matrix.stride()
    )


def assert_regions_equal(parameter: DTensor, whole: Tensor, atol: float) -> None:
    mesh = parameter.device_mesh
    region = region_of(whole.shape, tuple(mesh.shape), parameter.placements, mesh.get_coordinate())
    torch.testing.assert_close(parameter.to_local().detach(), region.of(whole), atol=atol, rtol=0)


def grouped(params: list[nn.Parameter]) -> list[dict]:
    """Put some matrices into a group with blocks, which are gathered, and others into one with other numbers."""
    return [
        {"params": params[:4]},
        {"params": [params[4]], "blocks": (3, 1)},
        {"params": params[5:], "lr": 0.03, "scale": "shape", "nesterov": False},
    ]


def unsharded(settings: dict, steps: int) -> list[Tensor]:
    params = [nn.Parameter(matrix) for matrix in matrices(0)]
    optimizer = Muon(grouped(params), 0.02, **settings)
    for step in range(steps):
        for parameter, gradient in zip(params, matrices(100 + step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in params]


def run_equal(rank: int, world: int, settings: dict, expected: list[Tensor], atol: float) -> int:
    joint = 0
    for layout in LAYOUTS if world == 4 else ("rows", "columns"):
        params = [nn.Parameter(part) for part in sharded(0, SHAPES, layout, world)]
        optimizer = Muon(grouped(params), 0.02, **settings)
        joint += sum(s is not None and s.tensor is not None for s in optimizer._distribution._chosen.values())
        for step in range(10):
            for parameter, gradient in zip(params, sharded(100 + step, SHAPES, layout, world), strict=True):
                parameter.grad = gradient
            optimizer.step()
        for parameter, whole in zip(params, expected, strict=True):
            assert_regions_equal(parameter, whole, atol)
    return joint


@pytest.mark.parametrize(("world", "tensor_parallel"), [(2, "gram"), (3, "gram"), (4, "gram"), (4, "gather")])
def test_both_ways_equal_unsharded_over_ten_steps(world: int, tensor_parallel: str) -> None:
    settings = {"dtype": torch.float32}
    cut = {**settings, "tensor_parallel": tensor_parallel}
    joint = run_ranks(run_equal, world, cut, unsharded(settings, 10), 1e-5)
    assert len(set(joint)) == 1
    assert (joint[0] > 0) == (tensor_parallel == "gram")


def test_the_distributed_form_in_bfloat16_stays_close_to_the_unsharded_update() -> None:
    settings = {"dtype": torch.bfloat16}
    run_ranks(run_equal, 2, {**settings, "tensor_parallel": "gram"}, unsharded(settings, 10), 0.05)


# --- which collectives run, and when ---------------------------------------------------------------------------


def run_recorded(rank: int, world: int, layout: str, shapes: list[tuple[int, int]]) -> list[tuple[str, int]]:
    params = [nn.Parameter(part) for part in sharded(0, shapes, layout, world)]
    for parameter, gradient in zip(params, sharded(1, shapes, layout, world), strict=True):
        parameter.grad = gradient
    optimizer = Muon(params, 0.1, tensor_parallel="gram")
    calls: list[tuple[str, int]] = []
    reduce, exchange, iterate = dist.all_reduce, dist.all_to_all_single, GramExchange._iterate

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(("all_reduce", tensor.numel()))
        return reduce(tensor, *args, **kwargs)

    def all_to_all(*args: Any, **kwargs: Any) -> Any:
        calls.append(("all_to_all", 0))
        return exchange(*args, **kwargs)

    def iterating(self: Any, reduction: Any) -> Any:
        calls.append(("iterate", reduction.number))
        return iterate(self, reduction)

    dist.all_reduce, dist.all_to_all_single, GramExchange._iterate = all_reduce, all_to_all, iterating
    try:
        optimizer.step()
    finally:
        dist.all_reduce, dist.all_to_all_single, GramExchange._iterate = reduce, exchange, iterate
    return calls


def test_one_matrix_needs_exactly_one_all_reduce_of_its_triangle() -> None:
    for calls in run_ranks(run_recorded, 2, "rows", [(30, 6)]):
        assert calls == [("all_reduce", 21), ("iterate", 0)]


def test_matrices_of_a_round_share_an_all_reduce_that_travels_while_others_are_computed() -> None:
    for calls in run_ranks(run_recorded, 2, "columns", [(6, 30)] * 8):
        sums = [call for call in calls if call[0] == "all_reduce"]
        rounds = [call for call in calls if call[0] == "iterate"]
        assert len(sums) == len(rounds) == 4
        assert [size for _, size in sums] == [2 * 21] * 4
        for number in range(3):
            assert calls.index(rounds[number]) > [i for i, c in enumerate(calls) if c in sums][number + 1]


def test_over_data_parallel_shards_each_matrix_is_summed_by_its_owners_only() -> None:
    recorded = run_ranks(run_recorded, 4, "fsdp over columns", [(4, 64)] * 6)
    # Ranks 0 and 1 hold the columns of the first data-parallel index, 2 and 3 those of the second.
    assert recorded[0] == recorded[1]
    assert recorded[2] == recorded[3]
    for calls in recorded:
        assert sum(size for name, size in calls if name == "all_reduce") == 3 * 10


# --- work and traffic ------------------------------------------------------------------------------------------

NARROW = [(80, 6), (100, 4), (80, 6), (12, 12), (9, 10), (64, 2), (80, 6), (120, 5)]


def run_counted(rank: int, world: int, layout: str, settings: dict) -> tuple[int, int, int]:
    params = [nn.Parameter(part) for part in sharded(0, NARROW, layout, world)]
    for parameter, gradient in zip(params, sharded(1, NARROW, layout, world), strict=True):
        parameter.grad = gradient
    optimizer = Muon(params, 0.1, **settings)
    with count_operations() as work, count_traffic() as traffic:
        optimizer.step()
    return work.flops, traffic.sent, sum(parameter.to_local().numel() * 4 for parameter in params)


@pytest.mark.parametrize("choice", ["gather", "auto"])
@pytest.mark.parametrize(("layout", "world"), [("rows", 2), ("rows", 3), ("fsdp over rows", 4)])
def test_bounds_on_work_and_bytes_hold_whichever_way_is_taken(layout: str, world: int, choice: str) -> None:
    each = [operations(*shape, 5, "standard", torch.bfloat16) for shape in NARROW]
    counted = run_ranks(run_counted, world, layout, {"tensor_parallel": choice})
    flops, sent, shards = zip(*counted, strict=True)
    assert max(flops) <= sum(each) / world + max(each)
    largest = max(rows * columns * 4 for rows, columns in NARROW)
    assert all(bytes_ <= 2 * shard + largest for bytes_, shard in zip(sent, shards, strict=True))
    assert sum(sent) <= 2 * sum(shards)
    assert (sum(flops) < sum(each)) if choice == "auto" else (sum(flops) == sum(each))


@pytest.mark.parametrize("world", [2, 3])
def test_the_cost_model_equals_what_is_counted(world: int) -> None:
    shapes = [shape for shape in NARROW if shape[0] > shape[1]]
    cuts = [TensorCut(n, m, world, 1, 6) for m, n in shapes]
    rows = [shape for shape in NARROW if shape not in shapes]
    gathered = sum(operations(*shape, 5, "standard", torch.bfloat16) for shape in rows)
    counted = run_ranks(run_counted, world, "rows", {"tensor_parallel": "gram"})
    # (12, 12) is cut along a side that is as long as the other, (9, 10) along the shorter one.
    square = distributed_operations(TensorCut(12, 12, world, 1, 6), 5)
    gathered -= operations(12, 12, 5, "standard", torch.bfloat16)
    assert counted[0][0] + counted[1][0] - gathered <= 2 * (
        sum(distributed_operations(c, 5) for c in cuts) + square
    )
    assert counted[0][0] >= sum(distributed_operations(c, 5) for c in cuts) + square
    numbers = sum(n * (n + 1) // 2 for _, n in [*shapes, (12, 12)])
    exchanged = math.ceil(90 / world) * 6 * 2
    assert all(0 <= sent - all_reduce_bytes(numbers, world) <= exchanged for _, sent, _ in counted)


@pytest.mark.parametrize(("ranks", "aspect"), [(2, 28.5), (4, 62.5), (8, 130.5)])
def test_the_cost_table_flips_at_the_documented_aspect(ranks: int, aspect: float) -> None:
    def choice(long: int) -> str:
        method = choose_method(256, long, "cpu")
        whole = operations(256, long, 5, method, torch.bfloat16)
        return choose_tensor_parallel(TensorCut(256, long, ranks, 1, 6), whole, 5, 2.0)

    flip = round(256 * aspect)
    assert choice(flip) == "gram"
    assert choice(flip - ranks) == "gather"
    assert choice(256) == "gather"
    assert choice(256 * 200) == "gram"


def test_the_cost_table_gathers_where_the_sum_would_send_more() -> None:
    # Forty steps make the whole matrix dear enough, so that the bytes decide: 6nm/W against 8n(n + 1).
    whole = operations(256, 720, 40, "standard", torch.bfloat16)
    assert choose_tensor_parallel(TensorCut(256, 720, 2, 1, 6), whole, 5, 1.0) == "gram"
    assert choose_tensor_parallel(TensorCut(256, 680, 2, 1, 6), whole, 5, 1.0) == "gather"
    assert choose_tensor_parallel(TensorCut(256, 720, 2, 4, 6), whole, 5, 1.0) == "gather"


# --- the distributed form itself -------------------------------------------------------------------------------


def together(matrix: Tensor, pieces: int, table: str, dtype: torch.dtype) -> Tensor:
    """Do on one rank what ``pieces`` ranks do."""
    triples = resolve(table, STEPS[table])
    parts, wide = matrix.chunk(pieces, dim=1), carrier(triples, dtype)
    sizes = [magnitude(part) for part in parts]
    packed = sum(packed_gram(part, size, wide) for part, size in zip(parts, sizes, strict=True))
    assert isinstance(packed, Tensor)
    norms, multiple, rests = polynomials(unpacked(packed[None], len(matrix)), triples, wide)
    out = torch.empty_like(matrix, dtype=dtype)
    for part, size, target in zip(parts, sizes, out.chunk(pieces, dim=1), strict=True):
        apply_polynomial(part, torch.stack((size, norms[0])), multiple, rests[0], target)
    return out


@pytest.mark.parametrize("table", sorted(TABLES))
@pytest.mark.parametrize("name", ["random", *sorted(spectra(8))])
@pytest.mark.parametrize("columns", [64, 160])
def test_one_sum_without_restarts_is_exact_for_hard_spectra(table: str, name: str, columns: int) -> None:
    matrix = random(64, columns) if name == "random" else with_spectrum(64, columns, spectra(64)[name])
    expected = orthogonal(matrix.float(), list(resolve(table, STEPS[table])))
    # Rounding of the result itself is all that is left of bfloat16.
    assert error(together(matrix.float(), 3, table, torch.bfloat16), expected) <= 3e-3
    assert error(together(matrix.float(), 3, table, torch.float32), expected) <= 1e-6
    assert (
        error(
            together(matrix, 3, table, torch.float64), orthogonal(matrix, list(resolve(table, STEPS[table])))
        )
        <= 1e-7
    )


def test_float32_carries_the_tables_that_grow_little_and_float64_the_others() -> None:
    chosen = {name: carrier(resolve(name, STEPS[name]), torch.bfloat16) for name in TABLES}
    assert chosen == {
        "quintic": torch.float32,
        "simple": torch.float32,
        "polar_express": torch.float64,
        "deepseek_v4": torch.float64,
    }
    assert carrier(resolve("quintic", 5), torch.float32) == torch.float64


@pytest.mark.parametrize("factor", [1e-36, 1e-9, 1e9, 1e36])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_o8_the_magnitude_plays_no_part_and_zeros_give_zeros(factor: float, dtype: torch.dtype) -> None:
    matrix = random(12, 40).float()
    matrix[:, :20] *= 1e-3  # pieces of different magnitudes
    plain = together(matrix, 2, "quintic", dtype)
    scaled = together((matrix.double() * factor).float(), 2, "quintic", dtype)
    assert error(scaled, plain.double()) <= (1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(together(torch.zeros(12, 40), 2, "quintic", dtype), torch.zeros(12, 40, dtype=dtype))


def test_large_sides_take_the_symmetric_products() -> None:
    matrix = random(520, 700).float()
    with count_operations() as count:
        result = together(matrix, 2, "quintic", torch.bfloat16)
    assert error(result, orthogonal(matrix)) <= 3e-3
    assert count.flops < distributed_operations(TensorCut(520, 700, 1, 1, 6), 5)


def test_o17_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel"):
        Muon([nn.Parameter(torch.ones(3, 3))], 0.1, tensor_parallel="split")
