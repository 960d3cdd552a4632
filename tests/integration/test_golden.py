"""The recorded losses of a tiny two-stage run.

A refactor leaves them bit for bit on the machine that recorded them, and within rounding elsewhere. A change of
numerics records new ones in a commit of its own, with the reason:

    ZGCM_RECORD_GOLDEN=1 python -m pytest tests/integration/test_golden.py
"""

import json
import os
from pathlib import Path

import pytest
import torch

from zgcm_testing.tiny_runs import tiny_recipe, write_tiny_data
from zgcm_train import run_recipe
from zgcm_train.files import read_json_lines
from zgcm_train.run_folder import describe_environment

GOLDEN = Path(__file__).parent / "golden" / "tiny_two_stages.json"


def machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    numbers = {
        line.split(":")[0].strip(): line.split(":")[1].strip()
        for line in lines
        if line.startswith(("cpu family", "model\t"))
    }
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{describe_environment()['processor']} {numbers}, {capability}, torch {torch.__version__}"


def test_losses_are_the_recorded_ones(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_tiny_data(tmp_path / "data")
    run_recipe(tiny_recipe(tmp_path / "data"), tmp_path / "run")
    records = [r for r in read_json_lines(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    losses = [r["loss"] for r in records]
    if "ZGCM_RECORD_GOLDEN" in os.environ:
        GOLDEN.write_text(json.dumps({"machine": machine(), "losses": losses}, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    if golden["machine"] == machine():
        assert losses == golden["losses"]
    assert losses == pytest.approx(golden["losses"], abs=1e-4)
