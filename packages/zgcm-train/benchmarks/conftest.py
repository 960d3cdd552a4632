"""A run of demo size on one thread, and how figures are told.

Times are processor seconds where ``ZGCM_CPU_TIME=1`` says that the machine does other work as well, else seconds on
the wall.
"""

import os
import time

import pytest
import torch

from zgcm_testing.tiny_runs import write_tiny_data
from zgcm_train.recipe_file import check_recipe

BUSY = os.environ.get("ZGCM_CPU_TIME") == "1"
CLOCK = time.process_time if BUSY else time.perf_counter


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_tiny_data(folder, length=512, rows=512)
    return folder


@pytest.fixture
def recipe(data):
    """The model and batch of ``zgcm-train demo``."""

    def make(**changes):
        values = {
            "model": {"preset": "zgcm-1-tiny"},
            "optimizer": {"lr": 2e-3, "dtype": "float32"},
            "data": {"sequence_length": 512, "global_batch": 8, "micro_batch": 4},
            "log": {"interval": 4},
            "checkpoint": {"interval": 1000},
            "stage": [{"name": "first", "data": str(data / "stage1"), "updates": 64}],
        }
        return check_recipe(values | changes, "benchmark")

    return make


@pytest.fixture
def clock():
    return CLOCK


@pytest.fixture
def report(capsys, benchmark):
    """Print a line even without -s, and keep the figures with the benchmark."""

    def say(text, **figures):
        benchmark.extra_info.update(figures)
        with capsys.disabled():
            print(f"\n  {text}", end="")

    return say
