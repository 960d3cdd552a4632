"""The build recipe: every choice of the offline pipeline in one TOML file."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from zgcm_data.records import CATEGORIES
from zgcm_data.sections import (
    STAGE_2_SEED,
    CleanRecipe,
    CurriculumRecipe,
    DatasetRecipe,
    DecontaminateRecipe,
    DedupRecipe,
    HeldoutRecipe,
    InputRecipe,
    LengthStageRecipe,
    MidtrainRecipe,
    QualityRecipe,
    StageRecipe,
    TokenizerRecipe,
)
from zgcm_data.tables import parse_section, require

STAGE_NAME = re.compile(r"(?!stage|work$|corpus$|heldout$)[a-z0-9][a-z0-9_-]*")
SHORTEST_PART = 16
STAGE_NAME_TEXT = "lower-case letters, digits and dashes, and no name that a build uses itself"

__all__ = [
    "STAGE_2_SEED",
    "BuildRecipe",
    "CleanRecipe",
    "CurriculumRecipe",
    "DatasetRecipe",
    "DecontaminateRecipe",
    "DedupRecipe",
    "HeldoutRecipe",
    "InputRecipe",
    "LengthStageRecipe",
    "MidtrainRecipe",
    "QualityRecipe",
    "StageRecipe",
    "TokenizerRecipe",
]


@dataclass(frozen=True)
class BuildRecipe:
    """Everything that decides what a build writes.

    Args:
        sequence_length: Tokens per row that are inputs (a row stores one more).
        rows_per_shard: Rows in each shard file.
        max_document_tokens: Longer documents are cut into equal parts that are documents of their own; 0 leaves
            them whole. The shares along stage 1 hold the better, the shorter the longest document is.
        packing: ``"concatenate"`` (as published) or ``"best_fit"`` (whole documents first, padding masked).
        exclude_builds: Folders of earlier builds; what their stages or held-out sets hold, exactly or nearly,
            leaves this one.
        input: See ``InputRecipe``; likewise the others.
    """

    sequence_length: int = 512
    rows_per_shard: int = 1024
    max_document_tokens: int = 0
    packing: str = "concatenate"
    exclude_builds: list[str] = field(default_factory=list)
    input: InputRecipe = field(default_factory=InputRecipe)
    clean: CleanRecipe = field(default_factory=CleanRecipe)
    dedup: DedupRecipe = field(default_factory=DedupRecipe)
    decontaminate: DecontaminateRecipe = field(default_factory=DecontaminateRecipe)
    heldout: HeldoutRecipe = field(default_factory=HeldoutRecipe)
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    curriculum: CurriculumRecipe = field(default_factory=CurriculumRecipe)
    stage1: StageRecipe = field(default_factory=StageRecipe)
    stage2: StageRecipe = field(default_factory=StageRecipe)
    midtrain: MidtrainRecipe = field(default_factory=MidtrainRecipe)

    def __post_init__(self) -> None:
        """Check what can be checked before any work is done."""
        check_recipe(self)

    @classmethod
    def from_toml(cls, path: Path) -> "BuildRecipe":
        """Read a recipe file.

        Args:
            path: A TOML file.

        Returns:
            The recipe.

        Raises:
            ValueError: If it is not TOML, or a key or value is wrong; the nearest key is suggested.
        """
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a TOML file: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "BuildRecipe":
        """Make a recipe from nested dictionaries; unknown keys are refused.

        Args:
            data: The sections and keys that differ from the defaults.

        Returns:
            The recipe.
        """
        recipe = parse_section(cls, data, "")
        assert isinstance(recipe, cls)
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Return the complete recipe as nested dictionaries.

        Returns:
            What ``from_dict`` reads.
        """
        return asdict(self)


def check_recipe(recipe: BuildRecipe) -> None:
    """Refuse values that cannot work.

    Args:
        recipe: The recipe.

    Raises:
        ValueError: Names the key, the value and the remedy.
    """
    positive = {
        "sequence_length": recipe.sequence_length,
        "rows_per_shard": recipe.rows_per_shard,
        "dedup.bands": recipe.dedup.bands,
        "dedup.rows": recipe.dedup.rows,
        "dedup.ngram": recipe.dedup.ngram,
        "decontaminate.ngram": recipe.decontaminate.ngram,
        "decontaminate.min_shared": recipe.decontaminate.min_shared,
        "heldout.bytes": recipe.heldout.bytes,
        "tokenizer.sample_bytes": recipe.tokenizer.sample_bytes,
    }
    for key, value in positive.items():
        require(value > 0, key, value, "a positive number")
    require(
        recipe.tokenizer.vocab_size >= 257,
        "tokenizer.vocab_size",
        recipe.tokenizer.vocab_size,
        "at least 257",
    )
    limit = recipe.max_document_tokens
    require(
        limit == 0 or limit >= SHORTEST_PART, "max_document_tokens", limit, f"0 or at least {SHORTEST_PART}"
    )
    require(0 < recipe.dedup.threshold <= 1, "dedup.threshold", recipe.dedup.threshold, "above 0, at most 1")
    cut = recipe.curriculum
    require(
        0 <= cut.low_quantile < cut.high_quantile <= 1,
        "curriculum.low_quantile",
        cut.low_quantile,
        "0 <= low < high <= 1",
    )
    require(0 <= recipe.tokenizer.fim_rate <= 1, "tokenizer.fim_rate", recipe.tokenizer.fim_rate, "0 to 1")
    require(
        recipe.packing in ("concatenate", "best_fit"),
        "packing",
        recipe.packing,
        "'concatenate' or 'best_fit'",
    )
    require(
        recipe.input.on_error in ("refuse", "skip"),
        "input.on_error",
        recipe.input.on_error,
        "'refuse' or 'skip'",
    )
    for name, stage in (("stage1", recipe.stage1), ("stage2", recipe.stage2)):
        check_stage(name, stage)
    check_midtrain(recipe.midtrain)


def check_midtrain(midtrain: MidtrainRecipe) -> None:
    """Refuse mid-training stages that cannot work.

    Args:
        midtrain: The section.

    Raises:
        ValueError: Names the key, the value and the remedy.
    """
    bounds = midtrain.bounds
    good = bool(bounds) and all(low < high for low, high in pairwise([0, *bounds]))
    require(good, "midtrain.bounds", bounds, "positive numbers in ascending order")
    names = [stage.name for stage in midtrain.stages]
    require(len(set(names)) == len(names), "midtrain.stages", names, "stages of different names")
    for stage in midtrain.stages:
        key = f"midtrain.stages.{stage.name}"
        require(STAGE_NAME.fullmatch(stage.name) is not None, f"{key}.name", stage.name, STAGE_NAME_TEXT)
        require(stage.rows > 0, f"{key}.rows", stage.rows, "a positive number")
        require(bool(stage.shares), f"{key}.shares", stage.shares, "at least one band and its share")
        for band, share in stage.shares.items():
            known = ", ".join(map(str, bounds))
            require(band in map(str, bounds), f"{key}.shares", band, f"one of the bounds {known}")
            require(share > 0, f"{key}.shares.{band}", share, "a positive number")
            fits = int(band) <= stage.sequence_length
            text = f"at least {band}, so that documents of that band fit a row"
            require(fits, f"{key}.sequence_length", stage.sequence_length, text)


def check_stage(name: str, stage: StageRecipe) -> None:
    """Refuse values of one stage that cannot work.

    Args:
        name: Its section.
        stage: The section.

    Raises:
        ValueError: Names the key, the value and the remedy.
    """
    require(stage.rows >= 0, f"{name}.rows", stage.rows, "0 or more")
    for category, share in stage.shares.items():
        require(category in CATEGORIES, f"{name}.shares", category, f"one of {', '.join(CATEGORIES)}")
        require(share > 0, f"{name}.shares.{category}", share, "a positive number")
    for category, epochs in stage.max_epochs.items():
        require(epochs >= 1, f"{name}.max_epochs.{category}", epochs, "1 or more")
