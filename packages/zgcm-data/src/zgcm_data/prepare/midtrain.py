"""Choose and order the documents of mid-training stages, each of a longer row than the one before."""

from dataclasses import asdict
from typing import Any

from zgcm_data import engine
from zgcm_data.curriculum import shuffle_order
from zgcm_data.length_stages import LengthStage, assign_length_stages
from zgcm_data.prepare.stages import stage_tokens, summary, tokens_held, usable, uses, with_ordinals
from zgcm_data.prepare.steps import Steps
from zgcm_data.recipe import BuildRecipe
from zgcm_data.sections import LengthStageRecipe


def order_length_stage(
    steps: Steps, recipe: BuildRecipe, stage: LengthStageRecipe, tokens: dict[str, Any]
) -> dict[str, Any]:
    """Choose and shuffle one stage; writes ``work/NAME``.

    Documents of the stages before it are not used again, whatever their length.

    Args:
        steps: The step runner.
        recipe: The recipe, with the sequence length of this stage.
        stage: The stage.
        tokens: Result of tokenization.

    Returns:
        Rows, tokens, documents, sources, and tokens by length band.
    """
    earlier = earlier_stages(recipe, stage.name)
    total, seed = stage_tokens(stage.rows, recipe), recipe.midtrain.seed
    wish = LengthStage(stage.name, total, {int(bound): share for bound, share in stage.shares.items()})
    column = engine.daft().col

    def work(tell: Any) -> dict[str, Any]:
        pool = usable(steps)
        for other in earlier:
            used = engine.read(steps.work / other.name).select("document")
            pool = pool.join(used, on="document", how="anti").collect()
        chosen = assign_length_stages(pool, [wish], seed, tuple(recipe.midtrain.bounds))[stage.name]
        chosen = chosen.with_column("epoch", engine.daft().lit(0))
        order = with_ordinals(steps, shuffle_order(chosen, seed))
        engine.write(order, steps.work / stage.name)
        sums = chosen.groupby("category", "source").agg(column("take").sum().alias("tokens"))
        quotas = {(row["category"], row["source"]): int(row["tokens"]) for row in engine.rows(sums)}
        bands = chosen.groupby("band").agg(column("take").sum().alias("tokens"))
        by_band = sorted((int(row["band"]), int(row["tokens"])) for row in engine.rows(bands))
        return summary(stage.rows, quotas, tokens_held(pool)) | {
            **uses(chosen),
            "sequence_length": stage.sequence_length,
            "bands": [{"up_to": bound, "tokens": count, "share": count / total} for bound, count in by_band],
        }

    inputs = {
        "tokens": tokens["key"],
        "earlier": [asdict(other) for other in earlier],
        "stage": asdict(stage),
    }
    inputs |= {"bounds": recipe.midtrain.bounds, "seed": seed, "packing": recipe.packing}
    return steps.run(f"order-{stage.name}", inputs, [steps.work / stage.name], work)


def earlier_stages(recipe: BuildRecipe, name: str) -> list[LengthStageRecipe]:
    """Return the stages that are trained before one."""
    names = [stage.name for stage in recipe.midtrain.stages]
    return recipe.midtrain.stages[: names.index(name)]
