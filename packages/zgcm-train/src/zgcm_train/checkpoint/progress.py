"""Where a run stands: the counters and identities that a strict resume needs."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self

from zgcm_train.errors import CheckpointError

FORMAT = "zgcm-checkpoint/1"


@dataclass
class Progress:
    """Counters of a run; all are global, exact integers.

    Attributes:
        step: optimizer updates done, over all stages; a skipped update counts, its data having passed.
        stage: number of the current stage, from 0.
        next_row: the row of the stage's own order that comes next.
        rows: rows consumed over all stages.
        tokens: input positions consumed over all stages.
        loss_tokens: targets that were learned from over all stages.
        skipped: updates left out because they were not finite, or spikes.
        skipped_in_a_row: those since the last update that was made.
        recent_losses: losses of the last updates made, for the policy on spikes; empty without one.
    """

    step: int = 0
    stage: int = 0
    next_row: int = 0
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    recent_losses: list[float] = dataclasses.field(default_factory=list)

    def enter_stage(self, stage: int) -> None:
        """Move to another stage: its rows start at 0, every global counter goes on."""
        self.stage, self.next_row = stage, 0


@dataclass(frozen=True)
class Identity:
    """What must be the same when a run goes on.

    Attributes:
        model: the architecture, as field names and values.
        data: per stage name, the digest of its shard set.
        tokenizer: SHA-256 of the tokenizer, as the shard sets name it.
        recipe: SHA-256 of the effective recipe.
        code: version of zgcm-train.
        world: number of processes.
    """

    model: dict[str, Any]
    data: dict[str, str]
    tokenizer: str
    recipe: str
    code: str
    world: int

    def refuse_mismatch(self, saved: Self, place: str) -> None:
        """Refuse to go on from a checkpoint of another model, dataset or tokenizer.

        Args:
            saved: the identity that the checkpoint holds.
            place: the checkpoint, for the message.

        Raises:
            CheckpointError: names what differs, with both values.
        """
        for field in ("model", "tokenizer"):
            mine, theirs = getattr(self, field), getattr(saved, field)
            if mine != theirs:
                raise CheckpointError(
                    f"{place} was made with another {field}: {theirs} there, {mine} now; "
                    "restore the old setting or start in a new run folder."
                )
        for stage, digest in self.data.items():
            if saved.data.get(stage, digest) != digest:
                raise CheckpointError(
                    f"{place} was trained on other data in stage {stage}: digest "
                    f"{saved.data[stage]} there, {digest} now; restore the data or start anew."
                )


def dump_state(progress: Progress, identity: Identity) -> str:
    """Return the text of ``state.json``."""
    state = {
        "format": FORMAT,
        "progress": dataclasses.asdict(progress),
        "identity": dataclasses.asdict(identity),
    }
    return json.dumps(state, indent=1, sort_keys=True) + "\n"


def parse_state(text: str, place: str) -> tuple[Progress, Identity]:
    """Read ``state.json``.

    Args:
        text: its content.
        place: the checkpoint, for the message.

    Raises:
        CheckpointError: another format, or fields missing or unexpected.
    """
    state = json.loads(text)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{place} has format {state.get('format')!r}; this version reads {FORMAT!r}.")
    try:
        return Progress(**state["progress"]), Identity(**state["identity"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{place}: state.json does not hold the fields of {FORMAT}: {error}.") from None
