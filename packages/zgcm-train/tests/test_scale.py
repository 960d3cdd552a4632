"""Ranks assembled without their machines: shapes, memory and traffic, checked against real runs."""

import io
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from zgcm_testing import run_ranks
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Recipe, make_plan
from zgcm_train.assembly import build_decoder, build_loader, build_optimizer, build_settings, open_stage
from zgcm_train.errors import ConfigurationError
from zgcm_train.mesh import build_layout
from zgcm_train.scale import RankMeasure, count_collectives, measure_rank, measure_ranks, sample_ranks
from zgcm_train.scale.measure import MemoryUse, Traffic
from zgcm_train.scale.tables import print_ranks
from zgcm_train.step import train_step

CPU = torch.device("cpu")
FP8 = {"compute": "bfloat16", "fp8": "hybrid", "gather": "fp8"}
MESHES = [
    pytest.param({"tp": 2, "cp": 2}, id="tp2xcp2"),
    pytest.param({"pp": 2, "dp_shard": 2}, id="pp2xfsdp2"),
]


def recipe_for(data: Path, parallel: dict[str, Any], **sections: Any) -> Recipe:
    shapes = {"global_batch": 12, "micro_batch": 1}
    return tiny_recipe(data, parallel=parallel, data=shapes, optimizer={"sharded": "blockwise"}, **sections)


def one_update(rank: int, world: int, recipe: Recipe) -> dict[str, Any]:
    layout = build_layout(recipe, CPU)
    decoder = build_decoder(recipe, CPU, layout)
    optimizer = build_optimizer(recipe, decoder)
    settings = build_settings(recipe, CPU, layout, decoder)
    loader = build_loader(recipe, open_stage(recipe, 0), 0, layout.data_rank)
    batches = list(itertools.islice(iter(loader), loader.accumulation))
    with count_collectives() as collectives:
        train_step(decoder, optimizer, batches, settings)
    # Messages of one number open a pipeline's connections and sum up counts and norms.
    large = [c for c in collectives if c.elements > 1 or c.kind == "all-to-all"]
    counts, sent = Counter(c.kind for c in large), Counter[str]()
    for collective in large:
        sent[collective.kind] += collective.sent
    parts = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in decoder.named_parameters()}
    state = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    bytes_of_state = sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in state)
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    return {"counts": counts, "sent": sent, "shapes": shapes, "state": bytes_of_state}


@pytest.mark.slow
@pytest.mark.parametrize("precision", [{}, FP8], ids=["float32", "fp8"])
@pytest.mark.parametrize("parallel", MESHES)
def test_an_assembled_rank_is_a_real_one(
    data: Path, parallel: dict[str, Any], precision: dict[str, str]
) -> None:
    recipe = recipe_for(data, parallel, precision=precision)
    real = run_ranks(one_update, 4, recipe)
    (measured,) = measure_ranks(recipe, [3])
    counts, sent = Counter[str](), Counter[str]()
    for traffic in measured.traffic:
        if traffic.purpose != "counts, norms":
            counts[traffic.kind] += traffic.count
            sent[traffic.kind] += traffic.sent
    state = measured.memory.optimizer_state
    assert {"counts": counts, "sent": sent, "shapes": measured.shapes, "state": state} == real[3]


def test_weights_gathered_in_fp8_are_sent_as_bytes(data: Path) -> None:
    sent: dict[str, int] = {}
    for gather in ("fp8", "float32"):
        recipe = recipe_for(data, {"dp_shard": 2}, precision=FP8 | {"gather": gather})
        (measured,) = measure_ranks(recipe, [0])
        assert {traffic.purpose for traffic in measured.traffic} >= {"weights", "gradients"}
        assert "documents" not in {traffic.purpose for traffic in measured.traffic}
        sent[gather] = sum(traffic.sent for traffic in measured.traffic if traffic.purpose == "weights")
    # Embedding, head and norms stay float32, the rest is a quarter.
    assert 0.25 * sent["float32"] < sent["fp8"] < 0.45 * sent["float32"]


def test_one_device_holds_everything_and_sends_nothing(data: Path) -> None:
    recipe = tiny_recipe(data)
    (measured,) = measure_ranks(recipe)
    memory, parameters = measured.memory, make_plan(recipe).parameters
    assert measured.traffic == ()
    assert memory.weights == memory.gradients == 4 * parameters
    # The rows of the update are alive between micro-batches as well.
    assert 4 * parameters <= memory.accumulated_gradients < 4.1 * parameters
    assert memory.gathered_weights == memory.weight_copies == 0
    assert memory.peak > memory.weights + memory.optimizer_state + memory.activations
    again = RankMeasure.from_dict(measured.as_dict())
    assert again == measured
    assert make_plan(recipe, [measured]).as_dict()["ranks"][0]["memory"]["peak"] == memory.peak


def test_activations_grow_with_rows_and_shrink_with_recomputation(data: Path) -> None:
    def activations(micro_batch: int, recompute: str) -> int:
        shapes = {"sequence_length": 64, "global_batch": 8, "micro_batch": micro_batch}
        recipe = tiny_recipe(data, data=shapes, parallel={"recompute": recompute}, eval={})
        return measure_rank(recipe, 0).memory.activations

    one, two, four = (activations(rows, "none") for rows in (1, 2, 4))
    assert four - two == 2 * (two - one) > 0
    assert activations(4, "full") < activations(4, "selective") < four


def test_the_traffic_of_a_mesh_of_all_axes_fits_into_80_columns() -> None:
    memory = MemoryUse(*[2**30] * 8, peak_phase="forward")
    axes = "dp_replicate+dp_shard+cp"
    traffic = (
        Traffic("weights", "all-gather", axes, 1_040, 217_626 * 10**6),
        Traffic("tensor parallel", "reduce-scatter", "tp", 1_040, 104_153 * 10**6),
        Traffic("gradients", "reduce-scatter", axes, 33, 14_858 * 10**6),
    )
    other = (*traffic[:1], Traffic("tensor parallel", "reduce-scatter", "tp", 1_032, 104_000 * 10**6))
    ranks = [RankMeasure(0, {}, {}, memory, traffic), RankMeasure(10_239, {}, {}, memory, other)]
    out = io.StringIO()
    print_ranks(ranks, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert ["weights: all-gather", "1,040", "217.626", "217.626"] in cells
    assert ["tensor parallel: reduce-scatter", "1,032-1,040", "104.153", "104.000"] in cells
    heads = [row[0] for row in cells if row[0].startswith("over ")]
    assert heads == [f"over {axes}", "over tp"]


def test_ranks_that_are_looked_at() -> None:
    assert sample_ranks(1) == (0,)
    assert sample_ranks(2) == (0, 1)
    assert sample_ranks(192) == (0, 191)


def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_assembled(data: Path) -> None:
    with pytest.raises(ConfigurationError, match="num_kv_heads"):
        measure_ranks(recipe_for(data, {"tp": 8}))


PROGRAM = """
import json, resource, sys
from zgcm_train import load_recipe
from zgcm_train.scale import measure_rank
measured = measure_rank(load_recipe("zgcm-1"), int(sys.argv[1])).as_dict()
print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "measured": measured}))
"""


@pytest.mark.slow
def test_the_published_run_at_192_ranks_fits_into_little_memory_here() -> None:

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "191"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    result = json.loads(done.stdout)
    assert result["peak"] < 4 * 2**30
    measured = RankMeasure.from_dict(result["measured"])
    assert measured.place == {"pp": 0, "dp_replicate": 0, "dp_shard": 47, "cp": 1, "tp": 1}
    assert len(measured.shapes) == 382
    # 154,880 rows over two tensor-parallel ranks, then over 96 shards of 807: the last one gets what is left.
    assert measured.shapes["lm_head.weight"] == (77_440 - 95 * 807, 4096)
    assert measured.shapes["layers.0.feed_forward.down_proj.weight"] == (4096 - 95 * 43, 5504)
    sent = {(t.purpose, t.kind): t for t in measured.traffic}
    # 27 window layers, 8 micro-batches: the last context rank returns 127 gradients of keys and values of 4 heads.
    halo = sent["window layers", "send"]
    assert (halo.count, halo.sent) == (27 * 8, 27 * 8 * 2 * 2 * 127 * 4 * 128 * 2)
    # 5 global layers: queries, keys, values and output, forward and backward; half of each leaves the rank.
    exchange = sent["global layers", "all-to-all"]
    assert (exchange.count, exchange.sent) == (
        5 * 8 * 8,
        5 * 8 * 2 * 8192 * 2 * (2 * 16 + 2 * 4) * 128 * 2 // 2,
    )
    assert halo.sent / 27 * 30 < exchange.sent / 5
