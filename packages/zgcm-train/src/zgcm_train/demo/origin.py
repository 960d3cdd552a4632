"""What the data of a demo were made from, compared before anything in its folder is made anew.

Data that are built again from other text give another tokenizer, which the checkpoints of the folder refuse: so once
the demo has trained, a folder whose text has changed is left as it is.
"""

import json
from pathlib import Path
from typing import Any

from zgcm_data import __version__ as data_version
from zgcm_data.prepare.ingest import content_of, environment
from zgcm_data.prepare.steps import PIPELINE
from zgcm_train.checkpoint.folder import checkpoints
from zgcm_train.errors import ConfigurationError
from zgcm_train.files import write_atomic

FILE = "origin.json"
SHOWN = 5


def check_origin(out: Path, corpus: Path | None) -> None:
    """Note what the data are made from, or refuse other text than that of a demo which has trained.

    Args:
        out: the demo's folder.
        corpus: the user's own text; the embedded corpus where there is none.

    Raises:
        ConfigurationError: the text is another; the differences and the remedy are named, nothing is changed.
        CorpusError: the user's text cannot be read.
    """
    file, now = out / FILE, describe_origin(corpus)
    if checkpoints(out / "checkpoints"):
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else now
        changed = differences(before, now)
        if changed:
            shown = "; ".join(changed[:SHOWN]) + (
                f"; and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            )
            remedy = "with the text as it was" if corpus else "from the environment that began it"
            raise ConfigurationError(
                f"{out} holds a demo that has trained on text which is another now: {shown}. Nothing was changed; "
                f"go on {remedy}, or choose another --out."
            )
    write_atomic(file, json.dumps(now, indent=1) + "\n")


def describe_origin(corpus: Path | None) -> dict[str, str]:
    """Return all that decides the data, by name.

    Args:
        corpus: the user's own text; the embedded corpus where there is none.
    """
    decides: dict[str, Any] = {"zgcm-data": f"{data_version} (pipeline {PIPELINE})"}
    if corpus is not None:
        return decides | content_of(corpus)
    found = environment()
    packages = dict(name.split("==", 1) for name in found["distributions"])
    return decides | {"Python": found["python"], "corpus": str(found["corpus"])} | packages


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """List what changed, as ``name old -> new``; of a digest its beginning is shown.

    Args:
        before: what the data were made from.
        now: what they would be made from.
    """
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [f"{name} {_short(before.get(name))} -> {_short(now.get(name))}" for name in names]


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    return value[:12] if len(value) == 64 else value
