"""Settings of an env file that only make sense together: the budget, the schedule, the mesh, and where to resume."""

from collections.abc import Mapping, Sequence
from typing import Any

from zgcm_train.errors import MissingSettingError
from zgcm_train.interchange.env_file import Assignment


class _Reader:
    """Numbers of one file, with what contradicts."""

    def __init__(self, file: str, read: Mapping[str, Assignment], problems: list[str]) -> None:
        self.file, self._read, self._problems = file, read, problems

    def text(self, key: str) -> str:
        """Return a variable, empty where it is not set."""
        return self._read[key].value if key in self._read else ""

    def needed(self, *keys: str) -> int:
        """Return the first of these that is set, as a number."""
        for key in keys:
            if self.text(key):
                return self.number(key)
        raise MissingSettingError(f"{self.file} does not set {' or '.join(keys)}; a recipe needs it.")

    def number(self, key: str) -> int:
        """Return a number; 0 where it is not set."""
        text = self.text(key)
        if text.startswith("${"):
            raise MissingSettingError(f"{self.file}: {key} needs {text}; set it and run again.")
        if text and not text.isdigit():
            self.refuse(f"{key}={text} is not a whole number")
        return int(text) if text.isdigit() else 0

    def refuse(self, problem: str) -> None:
        """Note a contradiction."""
        self._problems.append(f"{self.file}: {problem}")


def joint_values(
    file: str, read: Mapping[str, Assignment], before: Sequence[Mapping[str, Any]], problems: list[str]
) -> dict[str, Any]:
    """Return the recipe keys of one stage that follow from several variables.

    Args:
        file: its name.
        read: its variables.
        before: the stages that come before it.
        problems: gets every contradiction.

    Returns:
        Values by ``section.key``; those of the stage under ``stage``.

    Raises:
        MissingSettingError: a setting that a recipe needs is nowhere.
    """
    r = _Reader(file, read, problems)
    batch, done = r.needed("GLOBAL_BATCH_SIZE"), sum(int(stage["updates"]) for stage in before)
    resumed = _check_resume(r, batch, done, first=not before)
    name = r.text("EXP_NAME") or file.partition(".")[0]
    return {
        "stage.name": name,
        "stage.data": r.text("REAL_DATA_PREFIX") or f"${{ZGCM_DATA:-data}}/{name}",
        "stage.updates": _updates(r, batch, max(done, resumed)),
        **_schedule(r, batch, resumed if not before else 0),
        "optimizer.betas": [float(r.text("ADAM_BETA1") or 0.9), float(r.text("ADAM_BETA2") or 0.999)],
        "parallel.dp_shard": _replicas(r),
        "parallel.recompute": _recompute(r),
    }


def _check_resume(r: _Reader, batch: int, done: int, *, first: bool) -> int:
    """Return the update that the stage resumes at, and check it against the rows said to be consumed."""
    resumed = r.number("RESUME_ITER")
    if resumed and not first and resumed != done:
        r.refuse(f"RESUME_ITER={resumed}, but the stages before make {done} updates")
    consumed, offset = r.number("RESUME_CONSUMED_SAMPLES"), r.number("MEGATRON_DATASET_SAMPLE_OFFSET")
    if consumed != resumed * batch:
        r.refuse(
            f"RESUME_CONSUMED_SAMPLES={consumed} is not RESUME_ITER times GLOBAL_BATCH_SIZE, {resumed * batch}"
        )
    if offset not in (0, consumed):
        r.refuse(f"MEGATRON_DATASET_SAMPLE_OFFSET={offset} is not RESUME_CONSUMED_SAMPLES={consumed}")
    return resumed


def _updates(r: _Reader, batch: int, done: int) -> int:
    """Return the updates of the stage itself: the launcher's count goes on from the stage before."""
    samples = r.number("TRAIN_SAMPLES")
    if r.text("TRAIN_ITERS"):
        total = r.number("TRAIN_ITERS")
        if samples:
            r.refuse("TRAIN_ITERS and TRAIN_SAMPLES are both set")
    else:
        r.needed("TRAIN_ITERS", "TRAIN_SAMPLES")
        total = done + _whole(r, "TRAIN_SAMPLES", batch)
    if total <= done:
        r.refuse(f"TRAIN_ITERS={total} counts from the first stage and {done} updates are made before")
    return max(total - done, 1)


def _whole(r: _Reader, key: str, batch: int) -> int:
    samples = r.number(key)
    if samples % max(batch, 1):
        r.refuse(f"{key}={samples} is no multiple of GLOBAL_BATCH_SIZE={batch}")
    return samples // max(batch, 1)


def _schedule(r: _Reader, batch: int, resumed: int) -> dict[str, Any]:
    """Return warm-up and floor; a warm-up that is over before the stage begins is not made again."""
    found: dict[str, Any] = {}
    warmup = r.number("LR_WARMUP_ITERS") or _whole(r, "LR_WARMUP_SAMPLES", batch)
    if resumed and warmup > resumed:
        r.refuse(f"the warm-up of {warmup} updates is not over at RESUME_ITER={resumed}; import both stages")
    if warmup:
        found["schedule.warmup_updates"] = 0 if resumed else warmup
    if r.text("LR_DECAY_STYLE") == "cosine":
        found["schedule.min_lr"] = float(r.text("MIN_LR") or 0.0)
    decay, samples = r.number("LR_DECAY_SAMPLES"), r.number("TRAIN_SAMPLES")
    if decay and decay != samples:
        r.refuse(f"LR_DECAY_SAMPLES={decay} is not TRAIN_SAMPLES={samples}; the decay ends with the run here")
    return found


def _replicas(r: _Reader) -> int:
    devices = r.needed("NUM_NODES") * r.needed("GPUS_PER_NODE")
    model = max(r.needed("TP_SIZE") * r.needed("PP_SIZE") * r.needed("CP_SIZE"), 1)
    if devices % model:
        r.refuse(f"{devices} devices are no multiple of TP_SIZE x PP_SIZE x CP_SIZE = {model}")
    return max(devices // model, 1)


def _recompute(r: _Reader) -> str:
    if not r.number("ENABLE_RECOMPUTE"):
        return "none"
    granularity = r.text("RECOMPUTE_GRANULARITY")
    if granularity not in ("selective", "full"):
        r.refuse(f"RECOMPUTE_GRANULARITY={granularity!r} has no counterpart; known are selective, full")
    return granularity
