"""The rows of a stage: a shard set by its folder, or a Megatron indexed dataset by its prefix."""

from pathlib import Path

from zgcm_data import Dataset, DatasetFacts, open_dataset, verify_shards
from zgcm_train.config import Recipe
from zgcm_train.errors import PathError


def open_stage(recipe: Recipe, number: int) -> Dataset:
    """Open a stage's rows and check that they fit the recipe.

    Raises:
        PathError: they are missing, of another row length or vocabulary, or too few.
    """
    stage, data = recipe.stage[number], recipe.data
    rows = _open(recipe, number)
    manifest, needed = rows.manifest, stage.updates * data.global_batch
    if manifest.sequence_length != data.sequence_length:
        raise PathError(
            f"{stage.data} has rows of {manifest.sequence_length} positions, data.sequence_length is "
            f"{data.sequence_length}; make them equal."
        )
    vocabulary = recipe.model.architecture().vocab_size
    if manifest.vocab_size > vocabulary:
        raise PathError(
            f"{stage.data} uses {manifest.vocab_size} token ids, the model knows {vocabulary}; "
            "raise model.vocab_size."
        )
    if len(rows) < needed:
        raise PathError(
            f"Stage {stage.name!r} needs {needed} rows ({stage.updates} updates of {data.global_batch}), "
            f"{stage.data} has {len(rows)}; lower stage.updates or build more data."
        )
    return rows


def find_problems(recipe: Recipe, number: int) -> tuple[list[str], str]:
    """Read all of a stage's rows and return what is wrong with them, and their digest.

    Raises:
        PathError: they cannot be opened at all.
    """
    place = Path(recipe.stage[number].data)
    problems = [str(problem) for problem in verify_shards(place)] if place.is_dir() else []
    return problems, _open(recipe, number, checksum=not place.is_dir()).manifest.digest


def _open(recipe: Recipe, number: int, *, checksum: bool = False) -> Dataset:
    stage, data = recipe.stage[number], recipe.data
    facts = DatasetFacts()
    if not Path(stage.data).is_dir():  # the folder of a shard set says all this itself
        facts = DatasetFacts(
            sequence_length=data.sequence_length,
            vocab_size=data.megatron_vocab_size,
            eos_id=data.megatron_eos_id,
            tokenizer_sha256=data.megatron_tokenizer_sha256,
            source=stage.name,
        )
    try:
        return open_dataset(stage.data, facts, checksum=checksum)
    except (OSError, ValueError) as error:
        raise PathError(
            f"The data of stage {stage.name!r} cannot be opened: {str(error).rstrip('.')}."
        ) from error
