"""Score general text, choose and order the documents of both stages."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from zgcm_data import engine
from zgcm_data.complexity import METRIC, frequency_table, save_scale, score_frame, words_frame
from zgcm_data.curriculum import (
    APART,
    choose,
    curriculum_order,
    share_error,
    shuffle_order,
    without_outliers,
)
from zgcm_data.dedup import exclude
from zgcm_data.mixture import capacity, source_quotas
from zgcm_data.prepare.steps import Steps
from zgcm_data.recipe import BuildRecipe, StageRecipe
from zgcm_data.records import CorpusError

STAGE_1_PART = 4
Quotas = dict[tuple[str, str], int]


def score(steps: Steps, heldout: dict[str, Any]) -> dict[str, Any]:
    """Score the natural-language documents of the pool; writes ``work/scores`` and ``complexity.json``."""
    scores, scale_file = steps.work / "scores", steps.out / "complexity.json"
    column = engine.daft().col

    def work(tell: Any) -> dict[str, Any]:
        pool = engine.read(steps.work / "pool").where(~column("category").is_in(list(APART))).select("id")
        texts = engine.read(steps.work / "clean").select("id", "text").join(pool, on="id", how="semi")
        frame = words_frame(texts)
        counts = frequency_table(frame, steps.work / ".words")
        tell(0.5, f"{len(counts):,} different words")
        scale = score_frame(frame, counts, scores)
        save_scale(scale, scale_file)
        return {"metric": METRIC, "words": scale.total, "types": scale.types}

    return steps.run("score", {"pool": heldout["key"], "metric": METRIC}, [scores, scale_file], work)


def order_stage_1(
    steps: Steps, recipe: BuildRecipe, tokens: dict[str, Any], scored: dict[str, Any]
) -> dict[str, Any]:
    """Choose and order stage 1; writes ``work/stage1``."""
    target = steps.work / "stage1"
    column = engine.daft().col

    def work(tell: Any) -> dict[str, Any]:
        pool = usable(steps)
        apart = column("category").is_in(list(APART))
        scores = engine.read(steps.work / "scores").select(column("id").alias("document"), "score")
        natural = pool.where(~apart).select("id", "document").join(scores, on="document")
        cut = recipe.curriculum
        inside, bounds = without_outliers(natural, cut.low_quantile, cut.high_quantile)
        stays = (
            pool.where(apart)
            .concat(pool.where(~apart).join(inside.select("id"), on="id", how="semi"))
            .collect()
        )
        available = tokens_held(stays)
        rows = stage_rows(available, recipe, "stage1")
        quotas = plan(available, stage_tokens(rows, recipe), recipe.stage1, "stage1")
        chosen = choose(stays, quotas, f"stage1:{cut.seed}", recipe.stage1.max_epochs)
        order = with_ordinals(steps, curriculum_order(chosen, inside, f"curriculum:{cut.seed}"))
        engine.write(order, target)
        outliers = natural.count_rows() - inside.count_rows()
        return (
            summary(rows, quotas, available)
            | uses(chosen)
            | {"outliers": outliers, "bounds": bounds, "share_error": share_error(target)}
        )

    inputs = {"tokens": tokens["key"], "scores": scored["key"], "stage": asdict(recipe.stage1)}
    inputs |= {"curriculum": asdict(recipe.curriculum), "length": recipe.sequence_length}
    inputs["packing"] = recipe.packing
    inputs["stage2_rows"] = recipe.stage2.rows if recipe.stage1.shrink else 0
    return steps.run("order-1", inputs, [target], work)


def order_stage_2(steps: Steps, recipe: BuildRecipe, stage1: dict[str, Any]) -> dict[str, Any]:
    """Leave out what stage 1 holds, choose and shuffle stage 2; writes ``work/cross_stage`` and ``work/stage2``."""
    target, crossed = steps.work / "stage2", steps.work / "cross_stage"
    column = engine.daft().col

    def work(tell: Any) -> dict[str, Any]:
        pool = usable(steps)
        first = engine.read(steps.work / "stage1").select(column("document").alias("id")).distinct().collect()
        signatures = engine.read(steps.work / "signatures")
        ours = pool.select(column("document").alias("id"))
        candidates = signatures.join(ours, on="id", how="semi").join(first, on="id", how="anti")
        matches = exclude(candidates, signatures.join(first, on="id", how="semi"), recipe.dedup)
        engine.write(matches.sort("id"), crossed)
        tell(0.5, "choosing")
        gone = first.concat(matches.select("id"))
        gone = gone.select(column("id").alias("document"))
        rest = pool.join(gone, on="document", how="anti").collect()
        available = tokens_held(rest)
        rows = stage_rows(available, recipe, "stage2")
        quotas = plan(available, stage_tokens(rows, recipe), recipe.stage2, "stage2")
        chosen = choose(rest, quotas, f"stage2-choice:{recipe.stage2.seed}", recipe.stage2.max_epochs)
        engine.write(with_ordinals(steps, shuffle_order(chosen, recipe.stage2.seed)), target)
        kinds = matches.groupby("kind").agg(column("id").count().alias("documents"))
        removed = {row["kind"]: row["documents"] for row in engine.rows(kinds)}
        same = {"same": first.count_rows(), "exact": removed.get("exact", 0), "near": removed.get("near", 0)}
        return summary(rows, quotas, available) | uses(chosen) | {"left_out": same}

    inputs = {
        "packing": recipe.packing,
        "stage1": stage1["key"],
        "stage": asdict(recipe.stage2),
        "dedup": asdict(recipe.dedup),
    }
    return steps.run("order-2", inputs, [target, crossed], work)


def usable(steps: Steps) -> Any:
    """Return (id, document, source, category, tokens) of the documents, or their parts, of two tokens or more."""
    column = engine.daft().col
    frame = engine.read(steps.work / "tokens").select("id", "document", "source", "category", "tokens")
    return frame.where(column("tokens") >= 2).collect()


def tokens_held(frame: Any) -> Quotas:
    """Return the tokens of a pool per (category, source), end-of-document tokens included."""
    sums = frame.groupby("category", "source").agg((engine.daft().col("tokens") + 1).sum().alias("tokens"))
    return dict(sorted(((row["category"], row["source"]), int(row["tokens"])) for row in engine.rows(sums)))


def stage_rows(available: Quotas, recipe: BuildRecipe, name: str) -> int:
    """Return the rows that a stage gets.

    Without a number, or with ``shrink``, the rows that ``available`` fills are the limit; of these stage 1
    leaves stage 2 its part.
    """
    stage: StageRecipe = getattr(recipe, name)
    if stage.rows and not stage.shrink:
        return stage.rows
    tokens = capacity(available, stage.shares, stage.max_epochs)
    if name == "stage1":
        first, second = recipe.stage1.rows, recipe.stage2.rows
        tokens = tokens * first // (first + second) if first and second else tokens // STAGE_1_PART
    width = recipe.sequence_length + (recipe.packing == "best_fit")
    rows = max(tokens - 1, 0) // width
    return min(rows, stage.rows) if stage.rows else rows


def stage_tokens(rows: int, recipe: BuildRecipe) -> int:
    """Return the tokens that fill ``rows`` rows: with ``best_fit``, rows do not overlap."""
    if recipe.packing == "best_fit":
        return rows * (recipe.sequence_length + 1)
    return rows * recipe.sequence_length + 1


def plan(available: Quotas, total: int, stage: StageRecipe, name: str) -> Quotas:
    """Return the tokens wanted per (category, source).

    Raises:
        CorpusError: If the stage cannot be filled; names the stage and both numbers.
    """
    if total <= 1:
        raise CorpusError(f"{name}: the corpus does not fill one row; add text or lower sequence_length")
    try:
        return source_quotas(total, available, stage.shares, stage.max_epochs)
    except CorpusError as error:
        raise CorpusError(f"{name}: {error}") from error


def with_ordinals(steps: Steps, order: Any) -> Any:
    """Add the number of each document, or part of one, within its source."""
    window = engine.daft().Window().partition_by("source").order_by("id")
    ordinal = engine.daft().functions.row_number().over(window).cast(engine.daft().DataType.int64()) - 1
    ordinals = engine.read(steps.work / "tokens").select("id", "source").with_column("ordinal", ordinal)
    return order.join(ordinals.select("id", "ordinal"), on="id").sort("position")


def uses(chosen: Any) -> dict[str, int]:
    """Return how many documents a stage uses, and how often it uses a document or a part of one."""
    return {"documents": chosen.select("document").distinct().count_rows(), "uses": chosen.count_rows()}


def summary(
    rows: int, quotas: Mapping[tuple[str, str], int], available: Mapping[tuple[str, str], int]
) -> dict[str, Any]:
    """Return a stage's plan as a table that goes into ``build.json``."""
    total = sum(quotas.values())
    sources = [
        {
            "category": category,
            "source": source,
            "tokens": tokens,
            "available": available[category, source],
            "share": tokens / total,
            "epochs": tokens / available[category, source],
        }
        for (category, source), tokens in sorted(quotas.items())
    ]
    return {"rows": rows, "tokens": total, "sources": sources}
