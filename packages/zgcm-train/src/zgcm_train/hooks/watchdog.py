"""Notice a rank that hangs, name it, and end the run so that its launcher can start it again.

Every rank writes a sign of life with the place where it stands to ``logs/alive/``. A rank that has stood in one phase
of an update for longer than the recipe allows compares all signs, writes its finding to ``logs/hangs.jsonl``, its own
stack to ``logs/alive/``, and exits. Waiting ranks do the same, so nothing waits for a collective that never ends.
"""

import dataclasses
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from zgcm_data import Batch
from zgcm_train.files import append_json_line, write_atomic
from zgcm_train.processes import rank, world_size
from zgcm_train.step import StepResult
from zgcm_train.trainer import Hook, Trainer

PHASES = ("building", "reading data", "computing the update", "after the update")


@dataclass(frozen=True)
class Sign:
    """A sign of life of one rank.

    Attributes:
        rank: its number.
        host: its machine.
        pid: its process.
        step: updates it has done.
        phase: index into ``PHASES``.
        stands: seconds it has been in this phase.
        waiting: whether its main thread waits for other ranks.
        place: file, line and function of its main thread, outside of PyTorch where possible.
        time: when it was written, seconds since the epoch.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: int
    stands: float
    waiting: bool
    place: str
    time: float


def find_hung(signs: Sequence[Sign], now: float, allowed_silence: float) -> dict[int, str]:
    """Return which ranks hang, and why, from the signs of all ranks.

    A silent rank hangs; else those that are behind all others; else those that do not wait for anyone.

    Args:
        signs: one per rank.
        now: seconds since the epoch.
        allowed_silence: seconds after which a rank without a new sign is dead or stopped.
    """
    silent = [s for s in signs if now - s.time > allowed_silence]
    if silent:
        return {
            s.rank: f"gave no sign of life for {now - s.time:.0f} s, last seen {_where(s)}" for s in silent
        }
    furthest = max((s.step, s.phase) for s in signs)
    behind = [s for s in signs if (s.step, s.phase) < furthest]
    working = [s for s in signs if not s.waiting]
    suspects = behind or working or signs
    return {s.rank: f"has stood for {s.stands:.0f} s {_where(s)}" for s in suspects}


def _where(sign: Sign) -> str:
    return f"{PHASES[sign.phase]} (update {sign.step + 1}, {sign.place})"


class WatchdogHook(Hook):
    """Watches this rank's main thread from a thread of its own.

    Args:
        folder: the run folder, which all ranks see.
        timeout: seconds that one phase of an update may take; 0 turns the watchdog off.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        """Nothing runs before ``start``."""
        self.folder = folder
        self.timeout = timeout if world_size() > 1 else 0.0
        self.period = min(self.timeout / 8, 30.0)
        self.silence = 4 * self.period
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._main = threading.main_thread().ident
        self._stands = (0, 0, time.monotonic())

    def start(self) -> None:
        """Begin to watch; every rank calls this."""
        if self.timeout:
            (self.folder / "logs" / "alive").mkdir(parents=True, exist_ok=True)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def stage_start(self, trainer: Trainer) -> None:
        """Count what the other hooks do before the first update apart."""
        self._enter(trainer, 0)

    def step_start(self, trainer: Trainer) -> None:
        """Enter the phase of reading."""
        self._enter(trainer, 1)

    def batches_read(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        """Enter the phase of computing."""
        self._enter(trainer, 2)

    def step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Enter the phase of records, saves and evaluation."""
        self._enter(trainer, 3)

    def _enter(self, trainer: Trainer, phase: int) -> None:
        # A step that has just ended is counted already; its records still belong to it.
        self._stands = (trainer.progress.step - (phase == 3), phase, time.monotonic())

    def _watch(self) -> None:
        while True:
            sign = self._sign()
            write_atomic(self._file(rank(), "json"), json.dumps(dataclasses.asdict(sign)))
            if sign.stands > self.timeout:
                self._end_run(sign)
            if self._stop.wait(self.period):
                return

    def _sign(self) -> Sign:
        step, phase, since = self._stands
        waiting, place = describe_stack(sys._current_frames().get(self._main or 0))
        stands = time.monotonic() - since
        return Sign(
            rank(), socket.gethostname(), os.getpid(), step, phase, stands, waiting, place, time.time()
        )

    def _end_run(self, own: Sign) -> None:
        signs = [own, *(s for r in range(world_size()) if r != own.rank and (s := self._read(r)) is not None)]
        hung = find_hung(signs, time.time(), self.silence)
        text = "; ".join(f"rank {r} {reason}" for r, reason in sorted(hung.items()))
        message = f"No progress for {own.stands:.0f} s (parallel.hang_timeout {self.timeout:.0f}): {text}."
        record = {"noticed_by": own.rank, "ranks": sorted(hung), "message": message, "time": own.time}
        append_json_line(self.folder / "logs" / "hangs.jsonl", record)
        print(f"error: {message}", file=sys.stderr, flush=True)
        with self._file(own.rank, "stack").open("w") as file:
            faulthandler.dump_traceback(file)
        for sign in signs:
            if sign.host == own.host and time.time() - sign.time > self.silence:
                _kill(sign.pid)  # a stopped process does not hear the launcher's SIGTERM
        os._exit(1)  # the main thread may wait in a collective for ever: nothing else ends it

    def _read(self, number: int) -> Sign | None:
        try:
            return Sign(**json.loads(self._file(number, "json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def _file(self, number: int, kind: str) -> Path:
        return self.folder / "logs" / "alive" / f"rank-{number:05d}.{kind}"


def describe_stack(frame: FrameType | None) -> tuple[bool, str]:
    """Return whether a thread waits for other ranks, and its innermost place outside of PyTorch.

    Args:
        frame: the thread's innermost frame.
    """
    waiting, place = False, "unknown place"
    while frame is not None:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        inside = "/torch/" in name
        waiting |= inside and "/distributed/" in name
        if not inside:
            place = f"{Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
            break
        frame = frame.f_back
    return waiting, place


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has ended by itself
