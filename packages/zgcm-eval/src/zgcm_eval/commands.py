"""What each command of ``zgcm-eval`` does once its arguments are read."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zgcm_eval.adapters.lm_eval import TaskOptions, run_tasks
from zgcm_eval.adapters.specification import load_model
from zgcm_eval.compare import CompareOptions, compare_reports
from zgcm_eval.frozen import HeldoutDocument, HeldoutSet, freeze_heldout, load_heldout
from zgcm_eval.heldout import HeldoutOptions, evaluate_heldout
from zgcm_eval.long_context import LongContextOptions, evaluate_long_context
from zgcm_eval.memorization import MemorizationOptions, Sample, evaluate_memorization
from zgcm_eval.metrics import Report
from zgcm_eval.needles import FILLER, sentences_of
from zgcm_eval.protocol import ScoringModel
from zgcm_eval.report import read_report, table, write_report
from zgcm_eval.windows import Batching

DONE = 0
WORSE = 6
"""Exit code of ``compare --fail-if-worse``: a verification failed."""


def freeze(arguments: Namespace) -> int:
    """Freeze the documents of a JSONL file."""
    domains: dict[str, list[HeldoutDocument]] = {}
    for number, record in _records(arguments.documents, {"domain": str, "text": str}):
        document = HeldoutDocument(str(record.get("id", number)), record["text"])
        domains.setdefault(record["domain"], []).append(document)
    sets = [HeldoutSet(name, tuple(documents)) for name, documents in sorted(domains.items())]
    digest = freeze_heldout(Path(arguments.out), sets)
    rows = [
        {"domain": one.name, "documents": len(one.documents), "bytes": sum(d.bytes for d in one.documents)}
        for one in sets
    ]
    return _show(arguments, rows, {"digest": digest, "domains": rows})


def heldout(arguments: Namespace) -> int:
    """Measure a model on frozen sets."""
    sets = load_heldout(arguments.sets)
    options = HeldoutOptions(arguments.context, arguments.overlap, arguments.tokens_per_batch)
    return _report(arguments, evaluate_heldout(_model(arguments), sets, options, progress=_progress()))


def memorization(arguments: Namespace) -> int:
    """Measure how much of its training documents a model gives back."""
    model = _model(arguments)
    samples = [_sample(model, number, record) for number, record in _records(arguments.samples, {})]
    options = MemorizationOptions(arguments.prefix, arguments.continuation, arguments.batch)
    return _report(arguments, evaluate_memorization(model, samples, options, progress=_progress()))


def long_context(arguments: Namespace) -> int:
    """Measure retrieval by length and depth."""
    filler: tuple[str, ...] = FILLER
    if arguments.filler is not None:
        texts = [record["text"] for _, record in _records(arguments.filler, {"text": str})]
        filler = tuple(sentences_of(texts))
    options = LongContextOptions(
        tuple(arguments.lengths), tuple(arguments.depths), arguments.samples, arguments.seed, filler=filler
    )
    batching = Batching(arguments.tokens_per_batch)
    return _report(arguments, evaluate_long_context(_model(arguments), options, batching, _progress()))


def tasks(arguments: Namespace) -> int:
    """Run tasks of lm-evaluation-harness."""
    options = TaskOptions(
        tuple(arguments.tasks),
        arguments.shots,
        arguments.limit,
        arguments.include,
        Batching(arguments.tokens_per_batch),
    )
    found = run_tasks(_model(arguments), options)
    if arguments.out is not None:
        path = Path(arguments.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    rows = [
        {
            "task": task,
            "metric": metric,
            "value": value,
            "stderr": figures.get(metric.replace(",", "_stderr,", 1)),
        }
        for task, figures in found["results"].items()
        for metric, value in figures.items()
        if isinstance(value, float) and "_stderr," not in metric
    ]
    return _show(arguments, rows, found)


def compare(arguments: Namespace) -> int:
    """Compare two reports."""
    options = CompareOptions(arguments.confidence, arguments.resamples, arguments.seed)
    result = compare_reports(read_report(arguments.before), read_report(arguments.after), options)
    _show(arguments, result.rows(), result.as_dict(), f"\n{arguments.after} is {result.verdict}")
    return WORSE if arguments.fail_if_worse and result.verdict in ("worse", "mixed") else DONE


def report(arguments: Namespace) -> int:
    """Print reports as tables."""
    found = {path: read_report(path) for path in arguments.reports}
    if arguments.json:
        return _show(arguments, [], {path: one.as_dict() for path, one in found.items()})
    print("\n\n".join(f"{path}\n{table(one.rows())}" for path, one in found.items()))
    return DONE


def _model(arguments: Namespace) -> ScoringModel:
    return load_model(arguments.model, tokenizer=arguments.tokenizer, device=arguments.device)


def _sample(model: ScoringModel, number: int, record: Mapping[str, Any]) -> Sample:
    token_ids = record.get("token_ids")
    if token_ids is None and not isinstance(record.get("text"), str):
        raise ValueError(f"line {number} of the samples has neither token_ids nor text")
    return Sample(
        str(record.get("id", number)), tuple(model.encode(record["text"]) if token_ids is None else token_ids)
    )


def _records(path: str, fields: Mapping[str, type]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read JSON lines and check that each is an object with some fields."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is missing; give a file of JSON lines")
    with Path(path).open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
            for name, kind in fields.items():
                if not isinstance(record, dict) or not isinstance(record.get(name), kind):
                    raise ValueError(f"line {number} of {path} has no {name!r} of type {kind.__name__}")
            yield number, record


def _report(arguments: Namespace, result: Report) -> int:
    if arguments.out is not None:
        write_report(arguments.out, result)
    return _show(arguments, result.rows(), result.as_dict())


def _show(
    arguments: Namespace, rows: Sequence[Mapping[str, object]], record: Mapping[str, Any], remark: str = ""
) -> int:
    print(json.dumps(record, ensure_ascii=False) if arguments.json else table(rows) + remark)
    return DONE


def _progress() -> Callable[[int, int], None] | None:
    """Count on the same line of a terminal's standard error; elsewhere be silent."""
    if not sys.stderr.isatty():
        return None

    def tell(done: int, total: int) -> None:
        print(f"\r{done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return tell
