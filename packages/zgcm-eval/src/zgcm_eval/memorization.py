"""How much of its training text a model gives back, token for token.

A sample is the beginning of a document exactly as it was trained on: the model gets the end-of-document id
and the first ``prefix`` tokens, continues greedily, and the next ``continuation`` tokens are compared
position by position.

Samples are token ids. Text that is encoded again may be cut differently than in training, and words are not
what a model predicts; take the ids from the training rows where you can. Documents that are too short cannot
be measured and are counted apart, because leaving them out silently would change which documents the share is
about.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zgcm_eval.metrics import Metric
from zgcm_eval.protocol import LanguageModel
from zgcm_eval.windows import Progress

FORMAT = "zgcm-memorization-report/1"
"""Value of ``format`` in a report."""


@dataclass(frozen=True)
class Sample:
    """The first tokens of one training document, without any added id."""

    id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class MemorizationOptions:
    """What is given and what is asked.

    Args:
        prefix: tokens of the document that the model gets.
        continuation: tokens that it must give back.
        batch: prompts per call of ``generate``. It does not change the result.

    Source: 32 and 32 as in Biderman et al., "Emergent and Predictable Memorization in Large Language Models",
        2023.
    """

    prefix: int = 32
    continuation: int = 32
    batch: int = 16

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")


@dataclass(frozen=True)
class MemorizedSample:
    """How many tokens of one continuation came back at their position."""

    id: str
    matched: int


@dataclass(frozen=True)
class MemorizationReport:
    """The result of one model on samples of a training set."""

    digest: str
    prefix_id: int
    """The id that stood once before every prompt."""
    options: MemorizationOptions
    samples: tuple[MemorizedSample, ...]
    too_short: int
    """Documents that were left out because they have fewer tokens than prefix and continuation."""

    @property
    def exact(self) -> float:
        """Share of samples that came back whole."""
        whole = sum(sample.matched == self.options.continuation for sample in self.samples)
        return whole / len(self.samples)

    @property
    def partial(self) -> float:
        """Mean share of tokens that came back at their position."""
        matched = sum(sample.matched for sample in self.samples)
        return matched / (len(self.samples) * self.options.continuation)

    def conditions(self) -> dict[str, object]:
        """What two reports must share to be compared."""
        lengths = {"prefix": self.options.prefix, "continuation": self.options.continuation}
        return {"digest": self.digest, **lengths}

    def rows(self) -> list[dict[str, Any]]:
        """One row."""
        shares = {"exact": self.exact, "partial": self.partial}
        return [{"n": len(self.samples), "too_short": self.too_short, **shares}]

    def metrics(self) -> list[Metric]:
        """Both shares with their samples."""
        units, length = tuple(sample.id for sample in self.samples), self.options.continuation
        exact = tuple(float(sample.matched == length) for sample in self.samples)
        matched = tuple(float(sample.matched) for sample in self.samples)
        return [
            Metric("memorized exactly", units, exact, (1.0,) * len(units), False),
            Metric("tokens given back", units, matched, (float(length),) * len(units), False),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return {
            "format": FORMAT,
            "digest": self.digest,
            "prefix_id": self.prefix_id,
            "options": asdict(self.options),
            "n": len(self.samples),
            "too_short": self.too_short,
            "exact": self.exact,
            "partial": self.partial,
            "samples": [asdict(sample) for sample in self.samples],
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "MemorizationReport":
        """Read what ``as_dict`` wrote."""
        samples = tuple(MemorizedSample(**sample) for sample in record["samples"])
        return cls(
            record["digest"],
            record["prefix_id"],
            MemorizationOptions(**record["options"]),
            samples,
            record["too_short"],
        )


def evaluate_memorization(
    model: LanguageModel,
    samples: Sequence[Sample],
    options: MemorizationOptions | None = None,
    progress: Progress | None = None,
) -> MemorizationReport:
    """Ask for the continuation of every sample that is long enough.

    Args:
        model: the model; its ``generate`` must be greedy.
        samples: beginnings of documents.
        options: lengths and batch size.
        progress: called with (batches done, batches in all).

    Returns:
        The report.

    Raises:
        ValueError: no sample is long enough, or the lengths do not fit the model.
    """
    options = options or MemorizationOptions()
    need = options.prefix + options.continuation
    if need > model.max_length:
        raise ValueError(f"prefix and continuation have {need} tokens, this model takes {model.max_length}")
    long = [sample for sample in samples if len(sample.token_ids) >= need]
    if not long:
        raise ValueError(f"none of the {len(samples)} samples has {need} tokens; give longer documents")
    results: list[MemorizedSample] = []
    rounds = -(-len(long) // options.batch)
    for turn in range(rounds):
        batch = long[turn * options.batch : (turn + 1) * options.batch]
        prompts = [(model.prefix_id, *sample.token_ids[: options.prefix]) for sample in batch]
        for sample, new in zip(batch, model.generate(prompts, options.continuation), strict=True):
            results.append(MemorizedSample(sample.id, _matches(sample.token_ids[options.prefix : need], new)))
        if progress is not None:
            progress(turn + 1, rounds)
    return MemorizationReport(
        _digest(long, need), model.prefix_id, options, tuple(results), len(samples) - len(long)
    )


def _matches(expected: Sequence[int], produced: Sequence[int]) -> int:
    """Count equal positions; a continuation that ended early matches nothing after its end."""
    return sum(wanted == got for wanted, got in zip(expected, produced, strict=False))


def _digest(samples: Sequence[Sample], need: int) -> str:
    lines = (f"{sample.id}\0{' '.join(map(str, sample.token_ids[:need]))}\n" for sample in samples)
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()
