"""Several ranks at a time, each in a process of its own: PyTorch keeps the groups of a fake run in its caches."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from zgcm_train.config import Recipe
from zgcm_train.errors import VerificationError
from zgcm_train.mesh import refuse_misfit
from zgcm_train.scale.measure import RankMeasure


def sample_ranks(devices: int) -> tuple[int, ...]:
    """Return the first and the last rank: equal shares differ nowhere else, pipeline stages at the ends.

    Args:
        devices: ranks of the run.
    """
    return tuple(sorted({0, devices - 1}))


def measure_ranks(
    recipe: Recipe, ranks: Sequence[int] | None = None, *, tell: Callable[[int], None] = lambda rank: None
) -> tuple[RankMeasure, ...]:
    """Assemble ranks of a recipe without its machines, make one update on each, and measure it.

    Args:
        recipe: the effective recipe.
        ranks: their numbers; the first and the last one by default.
        tell: called with each number when it begins.

    Returns:
        One measure for each, in the same order.

    Raises:
        ConfigurationError: the mesh does not fit the model or the rows.
        VerificationError: a rank cannot be assembled.
    """
    devices = recipe.parallel.devices
    refuse_misfit(recipe, devices)
    work = partial(_measure, recipe.model_dump_json(), tell)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return tuple(pool.map(work, sample_ranks(devices) if ranks is None else ranks))


def _measure(recipe: str, tell: Callable[[int], None], rank: int) -> RankMeasure:
    tell(rank)
    done = subprocess.run(
        [sys.executable, "-m", "zgcm_train.scale", str(rank)],
        input=recipe,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise VerificationError(f"Rank {rank} cannot be assembled: {reason}; --no-assembly plans without.")
    return RankMeasure.from_dict(json.loads(done.stdout))
