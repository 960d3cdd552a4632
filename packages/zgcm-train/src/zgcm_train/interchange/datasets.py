"""What a Megatron dataset does not say about itself, from the tokenizer that the env file names beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zgcm_data.tokenizer import END_OF_TEXT, Tokenizer
from zgcm_train.interchange.env_file import Assignment

FACTS = "data.megatron_vocab_size, megatron_eos_id, megatron_tokenizer_sha256"
ELSEWHERE = "stage.data; not here: where it is, write PREFIX.zgcm.json with zgcm-data describe, or set data.megatron_*"


def dataset_values(
    file: str, read: Mapping[str, Assignment], problems: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the facts of a stage's Megatron dataset that has no ``PREFIX.zgcm.json``, where they can be known.

    Args:
        file: the env file's name.
        read: its variables.
        problems: gets the reason when the dataset is here and its facts are not.

    Returns:
        Recipe keys with values, and by variable what the report says about it.
    """
    prefix, tokenizer = (read[k].value if k in read else "" for k in ("REAL_DATA_PREFIX", "TOKENIZER_PATH"))
    if not prefix or Path(prefix).is_dir() or Path(f"{prefix}.zgcm.json").exists():
        return {}, {}
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if tokenizer and path.is_file():
        try:
            return _facts(path), {"TOKENIZER_PATH": FACTS}
        except ValueError as error:
            problems.append(f"{file}: TOKENIZER_PATH={tokenizer} cannot be used: {error}")
    elif Path(f"{prefix}.bin").exists():
        problems.append(
            f"{file}: REAL_DATA_PREFIX={prefix} is a Megatron dataset without {prefix}.zgcm.json, and "
            f"TOKENIZER_PATH={tokenizer} is no tokenizer.json, so its vocabulary and its end-of-document id are not "
            f"known; set TOKENIZER_PATH, or run: zgcm-data describe {prefix} --tokenizer tokenizer.json"
        )
    return {}, {"REAL_DATA_PREFIX": ELSEWHERE}


def _facts(path: Path) -> dict[str, Any]:
    tokenizer = Tokenizer(path, _end_of_document(path.with_name("tokenizer_config.json")))
    return {
        "data.megatron_vocab_size": tokenizer.vocab_size,
        "data.megatron_eos_id": tokenizer.eos_id,
        "data.megatron_tokenizer_sha256": tokenizer.sha256,
    }


def _end_of_document(config: Path) -> str:
    """Return the token that a ``tokenizer_config.json`` names, or the default without such a file."""
    named = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
    return str(named["content"] if isinstance(named, dict) else named or END_OF_TEXT)
