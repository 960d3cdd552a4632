"""The demo as a person runs it, on a corpus of their own: real text of the standard library, in a folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

MINUTES = "0.4"


def demo(out: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(out, *arguments), capture_output=True, text=True, timeout=280)


def command(out: Path, *arguments: object) -> list[str]:
    return [
        sys.executable,
        "-m",
        "zgcm_train",
        "demo",
        "--out",
        str(out),
        "--minutes",
        MINUTES,
        *map(str, arguments),
    ]


def metrics(out: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    measured = (
        "tokens_per_second",
        "tokens_per_second_per_device",
        "model_tflops",
        "model_tflops_if_all_full",
        "seconds",
        "seconds_left",
        "peak_memory_bytes",
    )
    return [{k: v for k, v in r.items() if k not in measured} for r in records]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About three megabytes: modules of the standard library as code, their docstrings' topics as text."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in sorted(library.glob("*.py")):
        shutil.copy(module, folder / module.name)
    topics = (library / "pydoc_data" / "topics.py").read_text(encoding="utf-8")
    for number, topic in enumerate(topics.split("\n\n'")):
        (folder / f"topic-{number}.txt").write_text(topic, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "first"
    result = demo(out, "--corpus", corpus, "--json")
    assert result.returncode == 0, result.stderr
    (out / "summary.txt").write_text(result.stdout)
    return out


def test_it_learns_and_says_where_everything_is(finished: Path) -> None:
    summary = json.loads((finished / "summary.txt").read_text())
    for values in summary["bits_per_byte"].values():
        assert values["start"] > values["stage switch"] > values["end"]
    assert Path(summary["report"]).stat().st_size > 10_000
    assert Path(summary["picture"]).read_bytes().startswith(b"\x89PNG")
    assert summary["tokens"] == metrics(finished)[-1]["tokens"]


def test_verify_agrees(finished: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "zgcm_train", "verify", str(finished)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout


def test_no_document_of_stage_one_is_in_stage_two(finished: Path) -> None:
    from zgcm_data import open_shards

    seen = []
    for stage in ("stage1", "stage2"):
        shards = open_shards(finished / "data" / stage)
        names = [source.name for source in shards.manifest.sources]
        docs = [doc for i in range(len(shards)) for doc in shards[i].docs.tolist()]
        seen.append({(names[source], ordinal) for _, source, ordinal, _ in docs if source >= 0})
    assert seen[0]
    assert seen[1]
    assert not seen[0] & seen[1]


def test_twice_gives_the_same_to_the_last_digit_even_when_killed(
    corpus: Path, finished: Path, tmp_path: Path
) -> None:
    """Killed while the data are built and again while it trains, it goes on and ends the same."""
    out = tmp_path / "second"
    for wanted in ("data/work/state", "checkpoints"):
        process = subprocess.Popen(
            command(out, "--corpus", corpus), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        _kill_when(out / wanted, process)
    result = demo(out, "--corpus", corpus)
    assert result.returncode == 0, result.stderr
    assert metrics(out) == metrics(finished)
    for stage in ("stage1", "stage2"):
        first, second = (
            json.loads((o / "data" / stage / "manifest.json").read_text()) for o in (out, finished)
        )
        assert first["digest"] == second["digest"]


def _kill_when(folder: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None and not (
        folder.is_dir() and any(p.suffix != ".tmp" for p in folder.iterdir())
    ):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_a_finished_demo_does_no_step_again(corpus: Path, finished: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (finished / "data").rglob("*.tar")}
    assert before
    result = demo(finished, "--corpus", corpus)
    assert result.returncode == 0, result.stderr
    assert "step " not in result.stderr
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_other_settings_in_the_same_folder_are_refused(finished: Path) -> None:
    result = demo(finished)
    assert result.returncode == 2
    assert "choose another --out" in result.stderr
