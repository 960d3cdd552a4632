"""Train one stage from built parts.

Construction lives in ``assembly``; everything that is not the update itself is a hook. A hook sees eight moments:
``stage_start``, ``step_start``, ``batches_read``, ``step_end``, ``saved``, ``save_failed``, ``stage_end`` and
``failed``.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.optim import Optimizer

from zgcm_data import Batch, Loader
from zgcm_model import Decoder
from zgcm_train.checkpoint import Progress, Saver
from zgcm_train.checkpoint.progress import Identity
from zgcm_train.checkpoint.saver import Outcome
from zgcm_train.config import Recipe
from zgcm_train.errors import DivergedError, InterruptedRunError, VerificationError, ZgcmError
from zgcm_train.mesh import Layout
from zgcm_train.processes import any_process, of_all
from zgcm_train.replicas import differing_replicas
from zgcm_train.step import StepResult, StepSettings, train_step


@dataclass
class Parts:
    """Everything that training one stage needs, already built.

    Attributes:
        recipe: the effective recipe.
        decoder: the model, initialized or restored.
        optimizer: Muon and Adam in one object.
        loader: yields this rank's micro-batches from the stage's next row on.
        schedule: learning rate of update k (1-based).
        settings: how an update is computed.
        progress: where the run stands; the trainer advances it.
        identity: what the run is.
        folder: the run folder.
        layout: how the run is spread over processes.
    """

    recipe: Recipe
    decoder: Decoder
    optimizer: Optimizer
    loader: Loader
    schedule: Callable[[int], float]
    settings: StepSettings
    progress: Progress
    identity: Identity
    folder: Path
    layout: Layout


class Hook:
    """Something that watches training; every moment does nothing unless overridden."""

    def stage_start(self, trainer: "Trainer") -> None:
        """Before the first update of this process in the stage."""

    def step_start(self, trainer: "Trainer") -> None:
        """Before an update reads its data."""

    def batches_read(self, trainer: "Trainer", batches: Sequence[Batch]) -> None:
        """After an update's micro-batches are there, before the forward pass."""

    def step_end(self, trainer: "Trainer", result: StepResult) -> None:
        """After an update; ``trainer.progress`` counts it."""

    def saved(self, trainer: "Trainer", checkpoint: Path) -> None:
        """After a checkpoint is complete.

        A save in the background is noticed at the end of a later update, which may differ between ranks.
        """

    def save_failed(self, trainer: "Trainer", error: ZgcmError) -> None:
        """After a save failed that training can do without; older checkpoints are untouched."""

    def stage_end(self, trainer: "Trainer") -> None:
        """After the stage's last update."""

    def failed(self, trainer: "Trainer", error: BaseException) -> None:
        """When an error ends training."""


@dataclass
class Trainer:
    """Runs the updates of one stage.

    Attributes:
        parts: what to train with.
        hooks: called in order at every moment.
        stop_requested: set it at any time, on any process, and training ends, saved, after the current update.
        stopping: whether the update just made is the last of this call; decided once, before ``step_end``.
        spiked: whether the loss of the update just made, or left out, was a spike.
    """

    parts: Parts
    hooks: Sequence[Hook] = ()
    stop_requested: bool = False
    stopping: bool = field(default=False, init=False)
    spiked: bool = field(default=False, init=False)
    last_save: int = field(default=-1, init=False)
    saver: Saver = field(init=False)

    def __post_init__(self) -> None:
        """Open the writer of checkpoints."""
        self.saver = Saver(
            self.parts.folder / "checkpoints", asynchronous=self.parts.recipe.checkpoint.asynchronous
        )

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        return self.parts.progress

    @property
    def last_update(self) -> int:
        """The update at which the stage is complete."""
        return self.parts.recipe.first_update(self.progress.stage + 1)

    @property
    def learning_rate(self) -> float:
        """The rate of the update that is next, or being made."""
        return self.parts.schedule(self.progress.step + 1)

    def fit(self) -> None:
        """Make the stage's remaining updates.

        Raises:
            InterruptedRunError: a stop was asked for; the state is saved.
            DivergedError: too many updates in a row were not finite.
            VerificationError: copies of the same weights differ between ranks.
        """
        self._tell(lambda hook: hook.stage_start(self))
        try:
            self._refuse_differing_replicas()
            batches = iter(self.parts.loader)
            while self.progress.step < self.last_update:
                self.train_step(batches)
                if self.stopping and self.progress.step < self.last_update:
                    self.save(required=True)
                    raise InterruptedRunError(
                        f"Stopped after update {self.progress.step}, saved; run again to go on."
                    )
            self.save(required=True)
        except BaseException as error:
            self._report_failure(error)
            raise
        finally:
            self.saver.close()
        self._tell(lambda hook: hook.stage_end(self))

    def train_step(self, batches: Iterator[Batch]) -> StepResult:
        """Make one update and count it."""
        parts = self.parts
        self._tell(lambda hook: hook.step_start(self))
        for group in parts.optimizer.param_groups:
            group["lr"] = self.learning_rate
        micro_batches = list(itertools.islice(batches, parts.loader.accumulation))
        self._tell(lambda hook: hook.batches_read(self, micro_batches))
        result = train_step(parts.decoder, parts.optimizer, micro_batches, parts.settings, self._refuses)
        self._count(result)
        self.stopping = any_process(self.stop_requested)
        self._tell(lambda hook: hook.step_end(self, result))
        self._settle(self.saver.poll())
        self._refuse_divergence()
        return result

    def _refuses(self, loss: float) -> bool:
        """Note whether the loss of the update at hand is a spike, and say whether to leave the update out."""
        policy = self.parts.recipe.optimizer.spikes()
        self.spiked = policy.is_spike(loss, self.progress.recent_losses)
        if not self.spiked:
            policy.remember(loss, self.progress.recent_losses)
        return self.spiked and policy.action != "record"

    def save(self, *, required: bool = False) -> None:
        """Save a checkpoint unless this very step is saved already.

        Args:
            required: wait until it is complete, and raise if it cannot be; otherwise a failed save is reported
                and training goes on.

        Raises:
            PathError: a required checkpoint cannot be written.
            VerificationError: copies of the same weights differ between ranks, of which a checkpoint keeps one.
        """
        if self.last_save != self.progress.step:
            self._refuse_differing_replicas()
            self._settle(self.saver.wait())
            self.saver.begin(self.parts.decoder, self.parts.optimizer, self.progress, self.parts.identity)
            self.last_save = self.progress.step
        if required or not self.saver.asynchronous:
            self._settle(self.saver.wait(), required=required)

    def _settle(self, outcome: Outcome, *, required: bool = False) -> None:
        """Tell the hooks how a save ended."""
        if isinstance(outcome, ZgcmError):
            self.last_save = -1
            if required:
                raise outcome
            error = outcome
            self._tell(lambda hook: hook.save_failed(self, error))
        elif outcome is not None:
            path = outcome
            self._tell(lambda hook: hook.saved(self, path))

    def _count(self, result: StepResult) -> None:
        progress, data = self.progress, self.parts.recipe.data
        progress.step += 1
        progress.next_row += data.global_batch
        progress.rows += data.global_batch
        progress.tokens += data.global_batch * data.sequence_length
        if result.applied:
            progress.loss_tokens += result.loss_tokens
            progress.skipped_in_a_row = 0
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += 1

    def _refuse_divergence(self) -> None:
        settings = self.parts.recipe.optimizer
        if self.spiked and settings.spike_action == "stop":
            raise DivergedError(
                f"Update {self.progress.step} has a loss of more than optimizer.spike_factor {settings.spike_factor} "
                'times the recent median, and optimizer.spike_action is "stop"; it was not made. Look at its rows, '
                "then go on from the newest checkpoint with another policy or a lower optimizer.lr."
            )
        allowed = settings.max_skipped
        if self.progress.skipped_in_a_row > allowed:
            raise DivergedError(
                f"{self.progress.skipped_in_a_row} updates in a row were not finite or spikes, {allowed} are "
                f"allowed (optimizer.max_skipped); the last was update {self.progress.step}. Go on from an earlier "
                "checkpoint with a lower optimizer.lr."
            )

    def _refuse_differing_replicas(self) -> None:
        found = sorted({name for names in of_all(differing_replicas(self.parts.decoder)) for name in names})
        if found:
            raise VerificationError(
                f"After update {self.progress.step}, {len(found)} weights are not the same on all ranks that hold a "
                f"copy: {', '.join(found[:3])}. Nothing was saved; start again from the newest checkpoint, and look "
                "for a faulty device if it happens again."
            )

    def _report_failure(self, error: BaseException) -> None:
        self._tell(lambda hook: hook.failed(self, error))

    def _tell(self, call: Callable[[Hook], None]) -> None:
        for hook in self.hooks:
            call(hook)
