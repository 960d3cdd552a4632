"""The meeting of all ranks before there is a process group: within a time, or with an error that names who is missing.

Every rank writes into the store that torchrun describes, first that it came, then that it joined the process group.
Joining opens connections between all ranks and may hang itself, so a thread with a connection of its own watches it.
"""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistStoreError

from zgcm_train.errors import MeetingError

GRACE = 5.0
"""Seconds by which rank 0 gives up later: its store tells the others who is missing."""


@dataclass(frozen=True)
class Place:
    """This rank and where the ranks meet.

    Attributes:
        rank: number of this rank.
        world: number of ranks.
        host: machine that holds the store.
        port: of the store.
        agent: whether torchrun holds the store; rank 0 does otherwise.
        start: names this start in a store that is there for all starts.
    """

    rank: int
    world: int
    host: str
    port: int
    agent: bool
    start: str

    def store(self, timeout: float, *, hold: bool = False) -> Store:
        """Return a new connection to the store, with the names of this start.

        Args:
            timeout: seconds.
            hold: be the one that holds the store.
        """
        store = TCPStore(
            self.host,
            self.port,
            self.world,
            is_master=hold,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
        return PrefixStore(f"zgcm/start-{self.start}", store)


def place_of_torchrun() -> Place:
    """Return what torchrun says in the environment."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    # A store that rank 0 holds is new at every start. torchrun's is not; but on several machines each counts its own
    # starts, so the count is a name that all ranks know on one machine only.
    counted = agent and os.environ.get("GROUP_WORLD_SIZE") == "1"
    return Place(
        rank=int(os.environ["RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
        host=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        agent=agent,
        start=os.environ["TORCHELASTIC_RESTART_COUNT"] if counted else "0",
    )


def meet(place: Place, timeout: float, join: Callable[[Store], None]) -> None:
    """Wait until all ranks are here, then let them join the process group.

    Args:
        place: this rank and where to meet.
        timeout: seconds for all to come, and again for all to join.
        join: called with the store; returns when this rank is in the group.

    Raises:
        MeetingError: some ranks did not come; they are named. Where some came and do not join, the process ends with
            that message instead, because the call that waits for them cannot be interrupted.
    """
    patience = timeout + (GRACE if place.rank == 0 else 0.0)
    store = _connect(place, timeout)
    try:
        store.set(f"came/{place.rank}", "")
        missing = _missing(store, place.world, "came", patience)
    except DistError as error:
        raise MeetingError(
            f"The store of the ranks at {place.host}:{place.port} went away while they met; see the output of "
            f"{_holder(place)}."
        ) from error
    if missing:
        raise MeetingError(message(place, missing, "did not start", timeout))
    done = threading.Event()
    watch = threading.Thread(
        target=_watch_joining, args=(place, timeout, patience, done), name="meeting", daemon=True
    )
    watch.start()
    try:
        join(store)
        store.set(f"joined/{place.rank}", "")
    finally:
        done.set()


def _connect(place: Place, timeout: float) -> Store:
    hold = place.rank == 0 and not place.agent
    try:
        return place.store(timeout, hold=hold)
    except DistError as error:
        late = f"was not there within {timeout:.0f} s (parallel.meet_timeout)"
        doing = "cannot be opened" if hold else late
        raise MeetingError(
            f"The ranks cannot meet: their store at {place.host}:{place.port} {doing}; see the output of "
            f"{_holder(place)}, and whether that port is free and reachable. {str(error).splitlines()[0]}"
        ) from error


def _holder(place: Place) -> str:
    return "torchrun on the first machine" if place.agent else "rank 0, which holds it"


def _missing(store: Store, world: int, mark: str, patience: float) -> list[int]:
    """Return the ranks without this mark when all have it, or when the time is over."""
    marks = [f"{mark}/{rank}" for rank in range(world)]
    try:
        store.wait(marks, timedelta(seconds=patience))
    except DistStoreError:  # the time is over
        return [rank for rank, key in enumerate(marks) if not store.check([key])]
    return []


def _watch_joining(place: Place, timeout: float, patience: float, done: threading.Event) -> None:
    if done.wait(patience):
        return
    missing = _missing(place.store(timeout), place.world, "joined", 0.1)
    others = [rank for rank in missing if rank != place.rank] or missing
    text = message(place, others, "started and did not join the process group", timeout)
    print(f"zgcm-train: {text}", file=sys.stderr, flush=True)
    os._exit(MeetingError.exit_code)  # the main thread waits in a connection for ever: nothing else ends it


def message(place: Place, missing: list[int], what: str, timeout: float) -> str:
    """Say who is missing at a meeting, and what to do.

    Args:
        place: where the ranks meet.
        missing: their numbers.
        what: they did not do.
        timeout: seconds that they had.
    """
    more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
    shown = ", ".join(map(str, missing[:16])) + more
    return (
        f"Of {place.world} ranks {len(missing)} {what} within {timeout:.0f} s (parallel.meet_timeout): {shown}. "
        f"See what their processes printed, and whether their machines reach {place.host}:{place.port}."
    )
