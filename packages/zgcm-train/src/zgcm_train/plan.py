"""What a recipe will do, computed before anything is started."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from zgcm_model import flops_per_token
from zgcm_train.config import Recipe
from zgcm_train.header import mesh_text, precision_lines
from zgcm_train.scale.measure import RankMeasure
from zgcm_train.scale.tables import print_ranks


@dataclass(frozen=True)
class StagePlan:
    """The exact budget of one stage; tokens are input positions."""

    name: str
    updates: int
    rows: int
    tokens: int
    first_update: int
    last_update: int


@dataclass(frozen=True)
class Plan:
    """The budget of a run.

    Attributes:
        parameters: of the model, exact.
        flops_per_token: forward and backward, attention windows counted exactly.
        flops_per_token_if_all_full: the common count that charges every layer as global, to compare with others'.
        flops_total: of the whole run, from that count.
        flops_six_n_d: the common estimate 6 x parameters x tokens, for comparison only.
        ranks: memory and traffic of some ranks, where they were measured.
    """

    name: str
    parameters: int
    tokens_per_update: int
    accumulation: int
    stages: tuple[StagePlan, ...]
    tokens: int
    flops_per_token: int
    flops_per_token_if_all_full: int
    flops_total: float
    flops_six_n_d: float
    devices: int
    mesh: str
    precision: tuple[str, ...]
    warnings: tuple[str, ...]
    ranks: tuple[RankMeasure, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def print(self, console: Console) -> None:
        """Print the plan for people."""
        stages = Table("stage", "updates", "rows", "tokens", "update range")
        for s in self.stages:
            stages.add_row(
                s.name,
                f"{s.updates:,}",
                f"{s.rows:,}",
                f"{s.tokens:,}",
                f"{s.first_update:,}-{s.last_update:,}",
            )
        console.print(f"{self.name}: {self.parameters:,} parameters on {self.devices} devices ({self.mesh})")
        console.print(
            f"{self.tokens_per_update:,} tokens per update in {self.accumulation} micro-batches per replica"
        )
        console.print(stages)
        console.print(
            f"{self.tokens:,} tokens in all; {self.flops_per_token / 1e9:.3f} GFLOP per token "
            f"({self.flops_per_token_if_all_full / 1e9:.3f} if every layer were counted as global); "
            f"{self.flops_total:.4g} FLOP in all (6ND would say {self.flops_six_n_d:.4g})"
        )
        print_ranks(self.ranks, console)
        for line in (*self.precision, *(f"warning: {w}" for w in self.warnings)):
            console.print(line, soft_wrap=True, highlight=False)


def make_plan(recipe: Recipe, ranks: Sequence[RankMeasure] = ()) -> Plan:
    """Compute the budget of a recipe; nothing is allocated and no file is read.

    Args:
        recipe: the effective recipe.
        ranks: what ``zgcm_train.scale.measure_ranks`` found out about some ranks, to be shown with it.
    """
    architecture, data = recipe.model.architecture(), recipe.data
    stages = tuple(_stage_plan(recipe, number) for number in range(len(recipe.stage)))
    tokens, parameters = sum(s.tokens for s in stages), architecture.num_parameters()
    flops = flops_per_token(architecture, data.sequence_length)
    return Plan(
        name=recipe.run.name,
        parameters=parameters,
        tokens_per_update=recipe.tokens_per_update,
        accumulation=data.global_batch // (data.micro_batch * recipe.parallel.data_parallel),
        stages=stages,
        tokens=tokens,
        flops_per_token=int(flops.total),
        flops_per_token_if_all_full=int(flops.total_if_all_full),
        flops_total=flops.total * tokens,
        flops_six_n_d=6.0 * parameters * tokens,
        devices=recipe.parallel.devices,
        mesh=mesh_text(recipe),
        precision=tuple(precision_lines(recipe)),
        warnings=tuple(_warnings(recipe)),
        ranks=tuple(ranks),
    )


def _stage_plan(recipe: Recipe, number: int) -> StagePlan:
    stage, first = recipe.stage[number], recipe.first_update(number)
    rows = stage.updates * recipe.data.global_batch
    return StagePlan(
        stage.name, stage.updates, rows, rows * recipe.data.sequence_length, first + 1, first + stage.updates
    )


def _warnings(recipe: Recipe) -> list[str]:
    found = []
    if recipe.schedule.warmup_updates >= recipe.stage[0].updates:
        found.append(
            f"the warm-up of {recipe.schedule.warmup_updates} updates is not over when stage "
            f"{recipe.stage[0].name!r} ends, so data and learning rate switch together"
        )
    if recipe.eval.heldout is None:
        found.append(
            "no held-out set: nothing will be measured at the stage switch; set eval.heldout and eval.tokenizer"
        )
    if recipe.optimizer.sharded == "blockwise" and recipe.parallel.tp > 1:
        found.append(
            f'optimizer.sharded "blockwise" makes the update depend on parallel.tp {recipe.parallel.tp}'
        )
    return found
