"""Readers that stall, die or fail: a named error or a recovery, never a hang, never a skipped row."""

import json
import multiprocessing
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from zgcm_data import Loader, LoaderOptions, ShardSet


def _read(shards: ShardSet, state_file: Path, log_file: Path) -> None:
    """Read four epochs from the saved position on, logging rows and saving the position after each batch."""
    loader = Loader(shards, 2, micro_batch=2, options=LoaderOptions(epochs=4))
    if state_file.exists():
        loader.load_state_dict(json.loads(state_file.read_text()))
    with log_file.open("a") as log:
        for batch in loader:
            log.write(json.dumps(batch.rows.tolist()) + "\n")
            log.flush()
            temporary = state_file.with_suffix(".tmp")
            temporary.write_text(json.dumps(loader.state_dict()))
            temporary.replace(state_file)
            time.sleep(0.003)


def test_a_reader_killed_mid_epoch_goes_on_with_the_row_after_its_last_state(
    tmp_path: Path, shards25: ShardSet
) -> None:
    state, log, kills = tmp_path / "state.json", tmp_path / "log.jsonl", 3
    log.touch()
    for number in range(kills + 1):
        before = len(log.read_text().splitlines())
        process = multiprocessing.get_context("fork").Process(target=_read, args=(shards25, state, log))
        process.start()
        while number < kills and len(log.read_text().splitlines()) < before + 5:
            assert process.is_alive()
            time.sleep(0.005)
        if number < kills:
            process.kill()
        process.join(60)
        assert process.exitcode == (-signal.SIGKILL if number < kills else 0)
    rows = [row for line in log.read_text().splitlines() for row in json.loads(line)]
    deduplicated = list(dict.fromkeys(rows))
    assert deduplicated == list(range(100))
    assert len(rows) - len(deduplicated) <= 2 * kills


class Slow:
    """Rows on storage that takes its time, and may stop altogether."""

    def __init__(self, shards: ShardSet, delay: float, *, stop_at: int | None = None) -> None:
        self.manifest, self._shards = shards.manifest, shards
        self._delay, self._stop_at = delay, stop_at
        self.released = threading.Event()

    def __len__(self) -> int:
        return len(self._shards)

    def block(self, rows: Any) -> Any:
        time.sleep(self._delay)
        if self._stop_at is not None and rows[-1] >= self._stop_at:
            self.released.wait(30)
        return self._shards.block(rows)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zgcm_data.loader.fields.BLOCK_ROWS", 4)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_slow_storage_only_costs_time(shards25: ShardSet, workers: int) -> None:
    loader = Loader(Slow(shards25, 0.02), 1, options=LoaderOptions(workers=workers, timeout=5))
    assert [int(batch.rows[0]) for batch in loader] == list(range(25))


def test_storage_that_stops_is_an_error_and_no_hang(shards25: ShardSet) -> None:
    rows = Slow(shards25, 0.0, stop_at=12)
    loader = Loader(rows, 1, options=LoaderOptions(workers=1, timeout=0.3))
    read: list[int] = []

    def read_all() -> None:
        for batch in loader:
            read.append(int(batch.rows[0]))

    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no data for 0\.3 seconds; check the storage"):
        read_all()
    assert time.monotonic() - started < 5
    assert read == list(range(12))
    rows.released.set()
    assert [int(batch.rows[0]) for batch in loader] == list(range(12, 25))


class Failing(Slow):
    """Rows that cannot be read from some row on."""

    def block(self, rows: Any) -> Any:
        if rows[-1] >= 12:
            raise OSError(5, "Input/output error")
        return self._shards.block(rows)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_failing_read_is_raised_where_it_belongs(shards25: ShardSet, workers: int) -> None:
    """Batches before the fault arrive; the fault arrives in their place, not before and not after."""
    read: list[int] = []

    def read_all() -> None:
        for batch in Loader(Failing(shards25, 0.0), 1, options=LoaderOptions(workers=workers)):
            read.append(int(batch.rows[0]))

    with pytest.raises(OSError, match="Input/output error"):
        read_all()
    assert read == list(range(12))


def test_readers_end_when_the_loop_is_left(shards25: ShardSet) -> None:
    def readers() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("zgcm-reader")]

    stream = iter(Loader(shards25, 1, options=LoaderOptions(workers=3)))
    next(stream)
    assert len(readers()) == 3
    del stream
    deadline = time.monotonic() + 5
    while readers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert readers() == []
