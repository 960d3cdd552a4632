import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zgcm_data.build import BuildResult

Write = Callable[[Path, list[dict[str, Any]]], Path]


@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_digests_as_this_process(
    built: BuildResult, tmp_path: Path, documents: list[dict[str, Any]], write_corpus: Write
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents)
    text = f'sequence_length = 64\nrows_per_shard = 50\n[input]\npath = "{corpus}"\n[heldout]\nbytes = 1500\n'
    text += "[tokenizer]\nvocab_size = 600\n[stage1]\nrows = 120\n[stage2]\nrows = 200\n"
    (tmp_path / "recipe.toml").write_text(text)
    command = [sys.executable, "-m", "zgcm_data.cli", "build", str(tmp_path / "recipe.toml")]
    command += ["--out", str(tmp_path / "out"), "--runner", "ray", "--json"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=500)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert report["digests"] == built.report["digests"]
