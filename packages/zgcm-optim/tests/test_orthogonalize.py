"""Orthogonalization: both methods against a float64 reference, at any magnitude, shape and spectrum."""

import math

import pytest
import torch
from optim_reference import QUINTIC, SIMPLE, orthogonal
from torch import Tensor

from zgcm_optim import TABLES, count_operations, orthogonalize, update_scale
from zgcm_optim.coefficients import resolve
from zgcm_optim.costs import choose_method, operations, segments
from zgcm_optim.products import SYMMETRIC_BLOCK, product, symmetric_product

STEPS = {"quintic": 5, "simple": 5, "polar_express": 8, "deepseek_v4": 10}
METHODS = ("standard", "gram")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_spectrum(rows: int, columns: int, values: Tensor) -> Tensor:
    left = torch.linalg.qr(random(rows, rows, seed=1))[0]
    right = torch.linalg.qr(random(columns, rows, seed=2))[0]
    return (left * values) @ right.T


def spectra(count: int) -> dict[str, Tensor]:
    index = torch.arange(1, count + 1, dtype=torch.float64)
    return {
        "flat": torch.ones(count, dtype=torch.float64),
        "power": 1 / index,
        "steep": 1 / index**2,
        "six decades": 10 ** (-6 * index / count),
        "few large": torch.where(index <= 8, 1.0, 1e-3).double(),
        "half small": torch.where(index <= count / 2, 1.0, 1e-2).double(),
    }


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("table", sorted(TABLES))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (1, 6), (40, 70)])
def test_float64_body_equals_the_polynomial_of_the_singular_values(
    table: str, method: str, shape: tuple[int, int]
) -> None:
    matrix, steps = random(*shape), STEPS[table]
    result = orthogonalize(matrix, steps=steps, coefficients=table, dtype=torch.float64, method=method)
    torch.testing.assert_close(result, orthogonal(matrix, list(resolve(table, steps))), atol=1e-7, rtol=0)


@pytest.mark.parametrize("table", sorted(TABLES))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(64, 64), (64, 200), (200, 64)])
def test_stated_bounds_of_float32_and_bfloat16(table: str, method: str, shape: tuple[int, int]) -> None:
    matrix = random(*shape).float()
    expected = orthogonal(matrix, list(resolve(table, STEPS[table])))
    for dtype, bound in ((torch.float32, 3e-4), (torch.bfloat16, 0.05)):
        result = orthogonalize(matrix, steps=STEPS[table], coefficients=table, dtype=dtype, method=method)
        assert error(result, expected) <= bound


@pytest.mark.parametrize("table", sorted(TABLES))
@pytest.mark.parametrize("name", sorted(spectra(8)))
@pytest.mark.parametrize("columns", [64, 160])
def test_gram_stays_bounded_and_close_to_standard_for_hard_spectra(
    table: str, name: str, columns: int
) -> None:
    matrix = with_spectrum(64, columns, spectra(64)[name]).float()
    expected = orthogonal(matrix, list(resolve(table, STEPS[table])))
    settings = {"steps": STEPS[table], "coefficients": table}
    standard = error(orthogonalize(matrix, method="standard", **settings), expected)
    gram = orthogonalize(matrix, method="gram", **settings)
    assert torch.linalg.matrix_norm(gram.double(), 2) <= 1.6
    assert error(gram, expected) <= 2.0 * standard + 0.1
    exact = orthogonalize(matrix, method="gram", dtype=torch.float32, **settings)
    assert error(exact, expected) <= 2e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("factor", [1e-30, 1e-9, 1e9, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_magnitude_of_the_input_plays_no_part(method: str, factor: float, dtype: torch.dtype) -> None:
    matrix = random(12, 20).float()
    plain = orthogonalize(matrix, method=method, dtype=dtype)
    scaled = orthogonalize(matrix * factor, method=method, dtype=dtype)
    assert error(scaled, plain.double()) <= (2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), (600, 700)])
def test_zeros_give_zeros(method: str, shape: tuple[int, ...]) -> None:
    assert torch.equal(orthogonalize(torch.zeros(shape), method=method), torch.zeros(shape))


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_equals_its_matrices(method: str) -> None:
    batch = random(2, 3, 10, 24).float()
    together = orthogonalize(batch, method=method, dtype=torch.float32)
    apart = torch.stack(
        [torch.stack([orthogonalize(m, method=method, dtype=torch.float32) for m in r]) for r in batch]
    )
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(2, 0, 4), (0, 4), (0, 3, 5)])
def test_empty_inputs_give_empty_outputs(method: str, shape: tuple[int, ...]) -> None:
    assert orthogonalize(torch.zeros(shape), method=method).shape == shape


@pytest.mark.parametrize("method", METHODS)
def test_the_input_is_left_alone_and_the_dtype_kept(method: str) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        matrix = random(6, 9).to(dtype)
        before = matrix.clone()
        assert orthogonalize(matrix, method=method).dtype == dtype
        assert torch.equal(matrix, before)


@pytest.mark.parametrize("method", METHODS)
def test_large_matrices_use_symmetric_blocks_and_fewer_operations(method: str) -> None:
    matrix = random(600, 700).float()
    with count_operations() as count:
        result = orthogonalize(matrix, method=method, dtype=torch.float32)
    assert count.flops < 0.95 * operations(600, 700, 5, method, torch.float32)
    assert error(result, orthogonal(matrix)) <= 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_counted_operations_equal_the_cost_model(method: str, dtype: torch.dtype) -> None:
    with count_operations() as count:
        orthogonalize(random(4, 20, 50), method=method, dtype=dtype)
    assert count.flops == 4 * operations(20, 50, 5, method, dtype)


@pytest.mark.parametrize("side", [2 * SYMMETRIC_BLOCK, 2 * SYMMETRIC_BLOCK + 37])
def test_symmetric_product_equals_the_plain_one(side: int) -> None:
    left = random(side, 40)
    addend = left @ left.T
    for extra in (None, addend):
        plain = product(left, left.T, torch.empty(side, side).double(), addend=extra, beta=0.5, alpha=2.0)
        blocks = symmetric_product(
            left, left.T, torch.empty(side, side).double(), addend=extra, beta=0.5, alpha=2.0
        )
        torch.testing.assert_close(blocks, plain)
        assert torch.equal(
            blocks[:SYMMETRIC_BLOCK, SYMMETRIC_BLOCK:], blocks[SYMMETRIC_BLOCK:, :SYMMETRIC_BLOCK].T
        )


@pytest.mark.parametrize(("side", "long"), [(260, 560), (390, 390), (390, 800)])
def test_symmetric_products_of_a_batch_equal_the_plain_ones(side: int, long: int) -> None:
    left = random(3, side, long)
    addend = left @ left.mT
    for extra, operand in ((None, left), (addend, addend)):
        with count_operations() as count:
            blocks = symmetric_product(
                operand, operand.mT, torch.empty_like(addend), addend=extra, beta=0.5, alpha=2.0
            )
        expected = 2.0 * operand @ operand.mT + (0.0 if extra is None else 0.5 * extra)
        torch.testing.assert_close(blocks, expected)
        whole = 2 * operand.shape[0] * side * side * operand.shape[-1]
        assert (count.flops < whole) == (extra is None or side >= 384)


def test_gram_needs_fewer_operations_where_auto_chooses_it() -> None:
    for device in ("cpu", "cuda"):
        assert choose_method(1024, 1024, device) == "standard"
        assert choose_method(768, 2064, device) == "gram"
        assert choose_method(16, 400, device) == "standard"
    assert operations(768, 2064, 5, "gram", torch.bfloat16) < operations(
        768, 2064, 5, "standard", torch.bfloat16
    )
    assert segments(7, 64, torch.bfloat16) == [2, 2, 2, 1]
    assert segments(7, 64, torch.float32) == [3, 3, 1]
    assert segments(3, 16, torch.bfloat16) == [1, 1, 1]


def test_tables_and_their_steps() -> None:
    assert resolve("quintic", 5) == tuple(QUINTIC)
    assert resolve("quintic", 7)[5:] == tuple(QUINTIC[:2])
    assert resolve("simple", 5) == tuple(SIMPLE)
    assert resolve("polar_express", 3) == TABLES["polar_express"].triples[:3]
    assert resolve("polar_express", 10)[7:] == ((1.875, -1.25, 0.375),) * 3
    assert resolve("deepseek_v4", 10)[8:] == ((2.0, -1.5, 0.5),) * 2
    assert resolve([(1.5, -0.5, 0.0)], 4) == ((1.5, -0.5, 0.0),) * 4
    assert all(table.source for table in TABLES.values())
    for name, steps in (("quintic", 4), ("deepseek_v4", 9), ("deepseek_v4", 11)):
        with pytest.raises(ValueError, match="coefficients"):
            resolve(name, steps)
    for bad in ([(1.0, 2.0, 3.0)] * 2, [], [(1.0, math.nan, 0.0)] * 5):
        with pytest.raises(ValueError, match="coefficients"):
            resolve(bad, 5)


def test_published_ranges_of_the_quintic_table() -> None:
    values = torch.logspace(math.log10(3e-3), 0, 4001, dtype=torch.float64)
    slope = math.prod(a for a, _, _ in QUINTIC)
    for a, b, c in resolve("quintic", 5):
        values = a * values + b * values**3 + c * values**5
    assert float(values.min()) == pytest.approx(0.978, abs=1e-3)
    assert float(values.max()) == pytest.approx(1.145, abs=1e-3)
    assert slope == pytest.approx(492.7, abs=0.1)


def test_update_scales() -> None:
    assert update_scale(11008, 4096, "spectral") == pytest.approx(104.92, abs=0.01)
    assert update_scale(4096, 1024, "match_rms_adamw") == pytest.approx(12.8)
    assert update_scale(400, 100, "shape") == 2.0
    assert update_scale(100, 400, "shape") == 1.0
    assert update_scale(100, 400, "unit_rms") == 0.5
    assert update_scale(7, 3, "none") == 1.0
    assert update_scale(0, 3, "unit_rms") == update_scale(3, 0, "unit_rms") == 1.0
    with pytest.raises(ValueError, match="scale"):
        update_scale(3, 3, "spektral")


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", torch.float16), ("method", "both"), ("steps", 0), ("coefficients", "x")]
)
def test_o17_invalid_arguments_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        orthogonalize(torch.ones(2, 2), **{field: value})
    with pytest.raises(ValueError, match="two dims"):
        orthogonalize(torch.ones(3))
