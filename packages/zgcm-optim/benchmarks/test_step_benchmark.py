"""One step of every installed Muon over each set of shapes.

    pytest packages/zgcm-optim/benchmarks --benchmark-group-by=param:title --benchmark-columns=min,median

Ratios between candidates are best taken from ``compare.py``, which lets them take turns.
"""

import pytest
from peers import CANDIDATES, SLOW, available, parameters
from shapes import SETS

WORKING, MISSING = available([name for name in CANDIDATES if name not in SLOW])


@pytest.mark.parametrize("title", list(SETS))
@pytest.mark.parametrize("name", list(WORKING))
def test_step(benchmark, name: str, title: str) -> None:
    optimizer = WORKING[name](parameters(SETS[title]))
    benchmark.extra_info["left_out"] = MISSING
    benchmark.pedantic(optimizer.step, rounds=3, warmup_rounds=1)
