"""Held-out sets on disk: frozen once, and refused when a byte of them changed.

A folder holds ``manifest.json`` and one ``<domain>.jsonl`` per domain, a document per line::

    {"id": "sympy/0017", "domain": "math", "text": "..."}

The manifest says ``{"format": "zgcm-heldout/1", "domains": [{"name", "documents", "bytes", "sha256"}],
"digest"}``. ``bytes`` are the UTF-8 bytes of the texts, ``sha256`` is that of the domain's file, and
``digest`` is the SHA-256 of every other field of the manifest as JSON with sorted keys and no spaces.

A validation set that follows the training corpus makes two checkpoints incomparable without any sign of it.
That is why nothing here can update a set: a new set is a new folder.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "zgcm-heldout/1"
"""Value of ``format`` in the manifest."""
MANIFEST = "manifest.json"
"""Name of the manifest in the folder of the sets."""
_RESTORE = "Restore the frozen set, or freeze a new one in another folder"


class HeldoutSetError(ValueError):
    """A held-out set that is missing, malformed or not the one that was frozen."""


@dataclass(frozen=True)
class HeldoutDocument:
    """One text that no training row may hold."""

    id: str
    text: str

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the raw text: the denominator of bits per byte."""
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class HeldoutSet:
    """The frozen documents of one domain."""

    name: str
    documents: tuple[HeldoutDocument, ...]
    sha256: str = ""
    """That of the domain's file; filled in for a set that was not read from one."""

    def __post_init__(self) -> None:
        if not self.sha256:
            object.__setattr__(self, "sha256", hashlib.sha256(self.file_bytes()).hexdigest())

    def file_bytes(self) -> bytes:
        """The content of the domain's file as ``freeze_heldout`` writes it."""
        lines = (
            json.dumps({"id": doc.id, "domain": self.name, "text": doc.text}, ensure_ascii=False) + "\n"
            for doc in self.documents
        )
        return "".join(lines).encode("utf-8")


def freeze_heldout(folder: Path, sets: Sequence[HeldoutSet]) -> str:
    """Write held-out sets for good; the manifest comes last, so a torn write is no set.

    Args:
        folder: a folder that holds no set yet; made if it is missing.
        sets: one set per domain.

    Returns:
        The digest of the sets.

    Raises:
        HeldoutSetError: the folder already holds a set, a domain comes twice or a name is no file name.
    """
    if (folder / MANIFEST).exists():
        raise HeldoutSetError(f"{folder} already holds a frozen set; a new set belongs in a new folder")
    names = [heldout.name for heldout in sets]
    for name in names:
        if names.count(name) > 1 or not name or name == ".." or name != Path(name).name:
            raise HeldoutSetError(f"domain {name!r} must be a file name of its own; got the domains {names}")
    folder.mkdir(parents=True, exist_ok=True)
    entries = [_write_domain(folder, heldout) for heldout in sets]
    manifest: dict[str, Any] = {"format": FORMAT, "domains": entries}
    manifest["digest"] = digest_of(manifest)
    _write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode("utf-8"))
    return str(manifest["digest"])


def load_heldout(folder: Path | str) -> list[HeldoutSet]:
    """Read frozen sets and check them against their digests.

    Args:
        folder: folder with a ``manifest.json``.

    Returns:
        One set per domain, in the order of the manifest.

    Raises:
        HeldoutSetError: something is missing or is not what was frozen; the message names the file.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder / MANIFEST)
    if manifest.get("digest") != digest_of(manifest):
        raise HeldoutSetError(
            f"{folder / MANIFEST} was changed after it was frozen: its digest is {manifest.get('digest')!r}, "
            f"its content has {digest_of(manifest)!r}. {_RESTORE}"
        )
    return [_read_domain(folder, entry) for entry in manifest["domains"]]


def digest_of(manifest: Mapping[str, Any]) -> str:
    """The digest that belongs to a manifest: over every field but ``digest``, in hexadecimal."""
    fields = {name: value for name, value in manifest.items() if name != "digest"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _write_domain(folder: Path, heldout: HeldoutSet) -> dict[str, Any]:
    content = heldout.file_bytes()
    _write_atomically(folder / f"{heldout.name}.jsonl", content)
    return {
        "name": heldout.name,
        "documents": len(heldout.documents),
        "bytes": sum(document.bytes for document in heldout.documents),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _write_atomically(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise HeldoutSetError(f"{path} is missing; give the folder of a frozen held-out set")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HeldoutSetError(f"{path} is not JSON ({error}); restore the frozen set") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or "domains" not in manifest:
        raise HeldoutSetError(f"{path} is not a manifest of format {FORMAT!r}; give a held-out set's folder")
    return manifest


def _read_domain(folder: Path, entry: dict[str, Any]) -> HeldoutSet:
    path = folder / f"{entry['name']}.jsonl"
    if not path.is_file():
        raise HeldoutSetError(f"{path} is missing although the manifest names it; restore the frozen set")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != entry["sha256"]:
        raise HeldoutSetError(
            f"{path} was changed after it was frozen: SHA-256 is {found}, "
            f"the manifest has {entry['sha256']}. {_RESTORE}"
        )
    # Only a newline ends a record: str.splitlines would also cut at U+2028 inside a text.
    records = [json.loads(line) for line in content.decode("utf-8").split("\n") if line]
    heldout = HeldoutSet(
        entry["name"], tuple(HeldoutDocument(str(r["id"]), r["text"]) for r in records), found
    )
    _check_counts(path, heldout, entry)
    return heldout


def _check_counts(path: Path, heldout: HeldoutSet, entry: dict[str, Any]) -> None:
    counted = (len(heldout.documents), sum(document.bytes for document in heldout.documents))
    stated = (entry["documents"], entry["bytes"])
    if counted != stated:
        raise HeldoutSetError(
            f"{path} holds {counted[0]} documents of {counted[1]} bytes, "
            f"the manifest says {stated[0]} of {stated[1]}. {_RESTORE}"
        )
