"""The ledger: what was learned from, per stage, source and interval, in exact integers.

One JSON object per line, appended with a single write and synced, so a crash tears at most the last line.
``Ledger.rewind`` repairs that line and drops what lies after the step a run resumes from, so nothing is
counted twice.

A record of kind ``interval`` holds, for the updates since the record before: ``rows``, ``tokens`` (rows times
T), ``loss_tokens``, ``documents``, and for each source its nominal share, rows, tokens, loss tokens, observed
share, documents, and ``epochs``: how often the stage has gone through the source so far. Other records are
events, such as a switch of stage.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zgcm_data.ledger_file import append, encode, read_ledger, repair, replace
from zgcm_data.loader.batch import Batch
from zgcm_data.rows import Integers
from zgcm_data.shards.manifest import Manifest

__all__ = ["Ledger", "read_ledger"]

_COLUMNS = ("tokens", "loss_tokens", "documents", "rows")


class Ledger:
    """Adds up batches and appends records.

    Args:
        path: the JSONL file, made if need be; None on ranks that must not write (every rank but one).
        stage: name of the stage.
        manifest: of the rows that are read.
        group: data-parallel process group to sum over; None for a single rank. Tensor- and context-parallel
            ranks are no part of it: they read the same rows.

    Raises:
        ValueError: the file is damaged before its last line.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        stage: str,
        manifest: Manifest,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.path, self.stage, self.manifest = None if path is None else Path(path), stage, manifest
        self._group = group
        self._sums = np.zeros((len(_COLUMNS) + 1, len(manifest.sources)), np.int64)
        self._seen = np.zeros(len(manifest.sources), np.int64)
        self._last_step = 0
        if self.path is not None:
            self._recover(self.path)

    def _recover(self, path: Path) -> None:
        repair(path)
        for record in read_ledger(path):
            if record["kind"] != "interval":
                continue
            self._last_step = max(self._last_step, record["step"])
            if record["stage"] == self.stage:
                self._seen += [source["tokens"] for source in record["sources"]]

    def add(self, batch: Batch) -> None:
        """Count a batch that was trained on."""
        columns = (batch.source_tokens, batch.source_loss_tokens, batch.source_documents, batch.source_rows)
        for total, column in zip(self._sums, columns, strict=False):
            total += column.numpy()
        self._sums[-1, 0] += int((batch.rows >= 0).sum())

    def write(self, *, step: int, global_rows: int, global_tokens: int) -> dict[str, Any] | None:
        """Append the record of the updates since the last one and start anew.

        Every rank of the group must call this; the counts are summed over it first.

        Args:
            step: updates done.
            global_rows: rows consumed by the run so far, all stages together.
            global_tokens: tokens consumed by the run so far.

        Returns:
            The record, on the rank that writes.

        Raises:
            ValueError: the ledger already holds this step or a later one.
        """
        sums = self._summed()
        self._sums[:] = 0
        self._seen += sums[0]
        if self.path is None:
            return None
        if step <= self._last_step:
            raise ValueError(
                f"{self.path} already reaches step {self._last_step}, so step {step} would count twice; "
                "call Ledger.rewind(path, step) with the step the run resumes from"
            )
        rows = int(sums[-1, 0])
        record = {
            "kind": "interval",
            "stage": self.stage,
            "step": step,
            "global_rows": global_rows,
            "global_tokens": global_tokens,
            "digest": self.manifest.digest,
            "rows": rows,
            "tokens": rows * self.manifest.sequence_length,
            "loss_tokens": int(sums[1].sum()),
            "documents": int(sums[2].sum()),
            "sources": self._source_records(sums),
        }
        self._last_step = step
        append(self.path, record)
        return record

    def _summed(self) -> Integers:
        sums = torch.from_numpy(self._sums.copy())
        if self._group is not None:
            on_gpu = dist.get_backend(self._group) == "nccl"
            sums = sums.cuda() if on_gpu else sums
            dist.all_reduce(sums, group=self._group)
        return np.asarray(sums.cpu().numpy())

    def _source_records(self, sums: Integers) -> list[dict[str, Any]]:
        total = int(sums[0].sum())
        records = []
        for source in self.manifest.sources:
            counts = {name: int(sums[column, source.id]) for column, name in enumerate(_COLUMNS)}
            seen = int(self._seen[source.id])
            records.append(
                {
                    "id": source.id,
                    "name": source.name,
                    "category": source.category,
                    "nominal_share": source.nominal_share,
                    "observed_share": counts["tokens"] / total if total else 0.0,
                    **counts,
                    "epochs": seen * source.epochs / source.tokens if source.tokens else 0.0,
                }
            )
        return records

    def event(self, kind: str, *, step: int | None = None, **fields: Any) -> dict[str, Any] | None:
        """Append an event, such as a switch of stage, length or learning rate.

        Args:
            kind: what happened; anything but ``interval``.
            step: updates done when it happened; the step of the last interval if not given.
            **fields: JSON values.

        Returns:
            The record, on the rank that writes.
        """
        if kind == "interval":
            raise ValueError("an event cannot be of kind 'interval'; use write() for intervals")
        if self.path is None:
            return None
        when = self._last_step if step is None else step
        record = {"kind": kind, "stage": self.stage, "step": when, **fields}
        append(self.path, record)
        return record

    def switch(
        self,
        previous: Manifest,
        *,
        step: int,
        global_tokens: int,
        learning_rate_changed: bool,
        heldout: Mapping[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Append the event that this stage begins where another ends.

        Old shares and repeats are those of the records so far; new ones are those that the stage's rows hold.
        Repeats are also summed over all stages, by the name of the source.

        Args:
            previous: manifest of the stage that ends.
            step: updates done.
            global_tokens: tokens consumed by the run so far.
            learning_rate_changed: whether the learning rate changes at the same moment.
            heldout: held-out losses and capability slices before the switch; those after it are an event of
                their own, once they are known.

        Returns:
            The record, on the rank that writes.
        """
        records = [] if self.path is None else read_ledger(self.path)
        return self.event(
            "switch",
            step=step,
            global_tokens=global_tokens,
            ended=previous.stage,
            learning_rate_changed=learning_rate_changed,
            length_changed=previous.sequence_length != self.manifest.sequence_length,
            order={"old": asdict(previous.order), "new": asdict(self.manifest.order)},
            old=_shares(previous, _consumed(records, previous)),
            new=_shares(self.manifest, [source.tokens for source in self.manifest.sources]),
            cumulative_epochs=_cumulative_epochs(records),
            heldout_before=None if heldout is None else dict(heldout),
        )

    @staticmethod
    def rewind(path: str | os.PathLike[str], step: int) -> int:
        """Drop every record after ``step``, and a torn last line; the file is replaced at once.

        Args:
            path: the JSONL file; a missing one is left missing.
            step: updates done at the point from which the run resumes.

        Returns:
            The number of records dropped.

        Raises:
            ValueError: the file is damaged before its last line.
        """
        file = Path(path)
        if not file.exists():
            return 0
        repair(file)
        records = read_ledger(file)
        kept = [record for record in records if record["step"] <= step]
        if len(kept) < len(records):
            replace(file, b"".join(encode(record) for record in kept))
        return len(records) - len(kept)


def _consumed(records: list[dict[str, Any]], manifest: Manifest) -> list[int]:
    """Tokens of each source that records say were consumed from a set."""
    totals = [0] * len(manifest.sources)
    for record in records:
        if record["kind"] == "interval" and record["digest"] == manifest.digest:
            totals = [
                total + source["tokens"] for total, source in zip(totals, record["sources"], strict=True)
            ]
    return totals


def _shares(manifest: Manifest, tokens: list[int]) -> list[dict[str, Any]]:
    total = sum(tokens)
    return [
        {
            "name": source.name,
            "nominal_share": source.nominal_share,
            "observed_share": count / total if total else 0.0,
            "tokens": count,
            "epochs": count * source.epochs / source.tokens if source.tokens else 0.0,
        }
        for source, count in zip(manifest.sources, tokens, strict=True)
    ]


def _cumulative_epochs(records: list[dict[str, Any]]) -> dict[str, float]:
    """How often each source was gone through, over all stages, by name."""
    latest: dict[tuple[str, str], float] = {}
    for record in records:
        if record["kind"] == "interval":
            latest.update({(record["stage"], s["name"]): s["epochs"] for s in record["sources"]})
    totals: dict[str, float] = {}
    for (_, name), epochs in latest.items():
        totals[name] = totals.get(name, 0.0) + epochs
    return totals
