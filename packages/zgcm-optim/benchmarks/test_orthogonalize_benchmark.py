"""Orthogonalization by shape and method: what the table of ``costs.CROSSOVERS`` is taken from.

pytest packages/zgcm-optim/benchmarks/test_orthogonalize_benchmark.py --benchmark-group-by=param:shape
"""

import pytest
import torch

from zgcm_optim import orthogonalize

SHAPES = [
    *(
        (side, round(side * aspect))
        for side in (128, 256, 512, 768, 1024)
        for aspect in (1, 1.3, 1.6, 2, 2.7, 4)
    ),
    (2048, 2048),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_method(benchmark, shape: tuple[int, int], method: str) -> None:
    batch = torch.randn(max(1, (1 << 20) // (shape[0] * shape[1])), *shape)
    benchmark.extra_info["elements"] = batch.numel()
    benchmark.pedantic(orthogonalize, (batch,), {"method": method}, rounds=3, warmup_rounds=1)
