"""Ranks that do not come, or come and do not join, are named within the time that the recipe allows."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from zgcm_train import meeting
from zgcm_train.errors import MeetingError
from zgcm_train.meeting import Place, meet, message, place_of_torchrun
from zgcm_train.process import join_torchrun

TIMEOUT = 2.0
Outcomes = dict[int, str]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE", 1.0)  # ranks are forked, so that they see it


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


def join(rank: int) -> str:
    join_torchrun(meet_timeout=TIMEOUT)
    dist.barrier()
    dist.destroy_process_group()
    return "joined"


def only_come(rank: int) -> str:
    place = Place(rank, 3, "localhost", int(os.environ["MASTER_PORT"]), agent=False, start="0")
    meet(place, 60.0, lambda store: time.sleep(60.0))
    return "never"


def start(world: int, doing: dict[int, Callable[[int], str]]) -> tuple[Outcomes, list[int | None], float]:
    """Start these of the ranks as torchrun would; return what each said, its exit code and the seconds."""
    context = multiprocessing.get_context("fork")
    said, port, began = context.Queue(), free_port(), time.monotonic()

    def work(rank: int, function: Callable[[int], str]) -> None:
        os.environ.update(TORCHELASTIC_RUN_ID="test", RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        try:
            said.put((rank, function(rank)))
        except MeetingError as error:
            said.put((rank, str(error)))

    ranks = [context.Process(target=work, args=item, daemon=True) for item in doing.items()]
    for process in ranks:
        process.start()
    ends = [wait_for(p, 0.0 if f is only_come else 20.0) for p, f in zip(ranks, doing.values(), strict=True)]
    return dict(said.get() for end in ends if end == 0), ends, time.monotonic() - began


def wait_for(process: Any, seconds: float) -> int | None:
    process.join(seconds)
    code: int | None = process.exitcode
    process.kill()
    return code


def test_ranks_that_are_all_there_join() -> None:
    said, _, _ = start(3, {0: join, 1: join, 2: join})
    assert said == {0: "joined", 1: "joined", 2: "joined"}


@pytest.mark.parametrize("missing", [1, 2])
def test_a_rank_that_never_starts_is_named_by_all_others(missing: int) -> None:
    said, _, seconds = start(3, {rank: join for rank in range(3) if rank != missing})
    assert len(said) == 2
    for text in said.values():
        assert f"Of 3 ranks 1 did not start within 2 s (parallel.meet_timeout): {missing}." in text
    assert seconds < 15.0


def test_without_rank_0_the_others_say_that_its_store_is_not_there() -> None:
    said, _, seconds = start(3, {1: join, 2: join})
    assert sorted(said) == [1, 2]
    for text in said.values():
        assert "was not there within 2 s (parallel.meet_timeout); see the output of rank 0" in text
    assert seconds < 15.0


def test_a_rank_that_comes_and_never_joins_is_named_and_ends_the_others(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said, ends, seconds = start(3, {0: join, 1: join, 2: only_come})
    assert ends == [1, 1, None]
    assert said == {}
    assert (
        "started and did not join the process group within 2 s (parallel.meet_timeout)"
        in capfd.readouterr().err
    )
    assert seconds < 60.0


@pytest.mark.parametrize(
    ("agent", "machines", "start"), [("True", "1", "2"), ("True", "4", "0"), ("False", "1", "0")]
)
def test_starts_have_names_where_all_ranks_know_them(
    monkeypatch: pytest.MonkeyPatch, agent: str, machines: str, start: str
) -> None:
    told = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}
    told |= {
        "TORCHELASTIC_USE_AGENT_STORE": agent,
        "GROUP_WORLD_SIZE": machines,
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert place_of_torchrun() == Place(3, 8, "first", 29500, agent=agent == "True", start=start)


def test_many_missing_ranks_are_counted() -> None:
    text = message(
        Place(0, 192, "first", 29500, agent=True, start="0"), list(range(20, 60)), "did not start", 600.0
    )
    assert "Of 192 ranks 40 did not start within 600 s" in text
    assert "33, 34, 35 and 24 more." in text
