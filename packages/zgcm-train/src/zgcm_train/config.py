"""The recipe: every setting of a run, checked before anything starts.

A recipe is TOML with the sections ``run``, ``model``, ``optimizer``, ``schedule``, ``precision``, ``parallel``,
``data``, ``checkpoint``, ``log``, ``eval`` and one ``[[stage]]`` per stage. Unknown keys are refused. A string
may hold ``${VAR}`` or ``${VAR:-default}``, filled from the environment.
"""

from typing import Self

from pydantic import Field, model_validator

from zgcm_train.sections import (
    CheckpointSection,
    DataSection,
    EvalSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PrecisionSection,
    RunSection,
    ScheduleSection,
    Section,
    StageSection,
)


class Recipe(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    parallel: ParallelSection = ParallelSection()
    data: DataSection = DataSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    eval: EvalSection = EvalSection()
    stage: tuple[StageSection, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [stage.name for stage in self.stage]
        if len(set(names)) != len(names):
            raise ValueError(f"stage names must differ, got {names}")
        step = self.data.micro_batch * self.parallel.data_parallel
        if self.data.global_batch % step:
            raise ValueError(
                f"data.global_batch {self.data.global_batch} is not a multiple of data.micro_batch "
                f"{self.data.micro_batch} times {self.parallel.data_parallel} data-parallel replicas; "
                f"use a multiple of {step}"
            )
        self._refuse_schedule()
        self._refuse_narrow_sums()
        self._refuse_unseen_outputs()
        architecture = self.model.architecture()
        if self.data.sequence_length > architecture.max_positions:
            raise ValueError(
                f"data.sequence_length {self.data.sequence_length} exceeds model.max_positions "
                f"{architecture.max_positions}; raise model.max_positions"
            )
        return self

    def _refuse_schedule(self) -> None:
        schedule, total = self.schedule, self.total_updates
        if schedule.min_lr > self.optimizer.lr:
            raise ValueError(
                f"schedule.min_lr {schedule.min_lr} exceeds optimizer.lr {self.optimizer.lr}; lower it"
            )
        if schedule.kind != "constant" and schedule.warmup_updates + schedule.decay_updates > total:
            raise ValueError(
                f"schedule.warmup_updates {schedule.warmup_updates} and decay_updates {schedule.decay_updates} exceed "
                f"the {total} updates of all stages; shorten them"
            )

    def _refuse_narrow_sums(self) -> None:
        if self.precision.reduce == "float32" or self.accumulation == 1:
            return
        if self.parallel.pp > 1 or self.parallel.gradient_sync == "last":
            raise ValueError(
                f'precision.reduce "{self.precision.reduce}" would also sum the gradients of {self.accumulation} '
                'micro-batches in it; set parallel.gradient_sync "every" and parallel.pp 1, or '
                'precision.reduce "float32"'
            )

    def _refuse_unseen_outputs(self) -> None:
        log, precision = self.log.numerics_interval, self.precision.tweo_weight
        for name in [
            n for n, v in (("log.numerics_interval", log), ("precision.tweo_weight", precision)) if v
        ]:
            if self.parallel.pp > 1:
                raise ValueError(
                    f"{name} needs the outputs of all layers on one rank; set parallel.pp 1 or {name} 0"
                )
            if self.model.compile:
                raise ValueError(
                    f"{name} cannot see inside compiled layers; set model.compile false or {name} 0"
                )

    @property
    def accumulation(self) -> int:
        """Micro-batches of one update on each data-parallel replica."""
        return self.data.global_batch // (self.data.micro_batch * self.parallel.data_parallel)

    @property
    def tokens_per_update(self) -> int:
        """Input positions that one update consumes: global batch times sequence length."""
        return self.data.global_batch * self.data.sequence_length

    @property
    def total_updates(self) -> int:
        """Updates of all stages together."""
        return sum(stage.updates for stage in self.stage)

    def first_update(self, stage: int) -> int:
        """Return how many updates are done when stage number ``stage`` (0-based) begins."""
        return sum(s.updates for s in self.stage[:stage])
