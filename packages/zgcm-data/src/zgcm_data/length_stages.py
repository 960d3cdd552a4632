"""Length-stage mixtures for mid-training: 16K, then 64K, then 256K.

Each stage has a longest document and takes its tokens from length bands by given shares; a band is named by
its upper bound. Short documents stay eligible in longer stages, but every document is used in one stage only.

| stage of the published recipe | bands |
|---|---|
| 16K | up to 16,384 |
| 64K | up to 16,384 and up to 65,536 |
| 256K | up to 16,384, up to 65,536 and up to 262,144 |

Source: mid-training stages of ZGCM-1; its released blend file feeds one mixture to all three stages, which
these functions replace by one mixture for each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zgcm_data import engine
from zgcm_data.curriculum import choose
from zgcm_data.mixture import largest_remainder
from zgcm_data.records import CorpusError

BOUNDS = (16_384, 65_536, 262_144)


@dataclass(frozen=True)
class LengthStage:
    """One stage.

    Args:
        name: For reports.
        tokens: Tokens of the stage, end-of-document tokens included.
        shares: Upper bound of a length band to its part of the tokens; bands that are not named give none.
    """

    name: str
    tokens: int
    shares: Mapping[int, float]


def assign_length_stages(
    pool: Any, stages: Sequence[LengthStage], seed: int, bounds: Sequence[int] = BOUNDS
) -> dict[str, Any]:
    """Choose the documents of every stage.

    Args:
        pool: Frame (id, document, category, source, tokens).
        stages: In the order in which they are trained.
        seed: Key of the choice.
        bounds: Upper bounds of the bands, ascending.

    Returns:
        Stage name to a collected frame with ``band`` and ``take`` (tokens used, see ``choose``).

    Raises:
        CorpusError: If a band holds fewer tokens than a stage asks of it; names stage, band and both numbers.
        ValueError: If a stage names a band that is not one of the bounds.
    """
    column = engine.daft().col
    rest = pool.with_column("band", band_of(column("tokens"), bounds)).collect()
    result = {}
    for stage in stages:
        quotas = band_quotas(stage, rest, bounds)
        banded = rest.select("id", "document", column("band").alias("source"), "tokens")
        banded = banded.with_column("category", engine.daft().lit("all"))
        chosen = choose(
            banded, {("all", str(bound)): quota for bound, quota in quotas.items()}, f"length:{seed}", {}
        )
        named = chosen.select("id", "document", column("source").alias("band"), "tokens", "take")
        result[stage.name] = named.join(pool.select("id", "source", "category"), on="id").sort("id").collect()
        rest = rest.join(named.select("document"), on="document", how="anti").collect()
    return result


def band_of(tokens: Any, bounds: Sequence[int]) -> Any:
    """Return the expression of the band that holds a document and its end, ``""`` above the longest."""
    lit, when = engine.daft().lit, engine.daft().functions.when
    expression = when(tokens < bounds[0], lit(str(bounds[0])))
    for bound in bounds[1:]:
        expression = expression.when(tokens < bound, lit(str(bound)))
    return expression.otherwise(lit(""))


def band_quotas(stage: LengthStage, rest: Any, bounds: Sequence[int]) -> dict[int, int]:
    """Split a stage's tokens over its bands and check that each holds enough.

    Raises:
        CorpusError: If one does not.
        ValueError: If one is no band.
    """
    column = engine.daft().col
    unknown = sorted(set(stage.shares) - set(bounds))
    if unknown:
        raise ValueError(
            f"stage {stage.name} names the band {unknown[0]}; the bands are {', '.join(map(str, bounds))}"
        )
    sums = rest.groupby("band").agg((column("tokens") + 1).sum().alias("held"))
    held = {row["band"]: int(row["held"]) for row in engine.rows(sums)}
    parts = largest_remainder(stage.tokens, {str(bound): share for bound, share in stage.shares.items()})
    for band, quota in parts.items():
        if quota > held.get(band, 0):
            raise CorpusError(
                f"stage {stage.name} asks {quota:,} tokens of documents up to {band}, but {held.get(band, 0):,} "
                "are left of them; lower its tokens or its share of that band"
            )
    return {int(band): quota for band, quota in parts.items() if quota}
