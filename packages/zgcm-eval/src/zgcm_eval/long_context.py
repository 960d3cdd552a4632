"""Retrieval from long texts, layered by length and by where in the text the fact stands.

Each prompt hides the number of one place among filler and three distractors (the numbers of other places) and
asks for it. Two figures per cell:

- retrieved: the first number that the model generates is the right one. The words around it do not matter.
- preferred: the right number is more probable than each distractor. A model that cannot answer questions may
still
  show here that it read the text.

The shortest length is the baseline: a model that fails there fails for other reasons than length.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from zgcm_eval.continuation import encode_pair, score_continuations
from zgcm_eval.metrics import Metric
from zgcm_eval.needles import FILLER, Needle, build_needle, cell_seed, retrieved
from zgcm_eval.protocol import ScoringModel
from zgcm_eval.windows import Batching, Progress

FORMAT = "zgcm-long-context-report/1"
"""Value of ``format`` in a report."""


@dataclass(frozen=True)
class LongContextOptions:
    """The layers, and how many prompts each has.

    Args:
        lengths: tokens of a prompt, the prefix id included.
        depths: where the fact stands; 0 is the start of the text, 1 its end.
        samples: prompts per cell.
        seed: of the prompts.
        max_new_tokens: generated tokens in which the number must begin and end.
        filler: sentences between the facts, for instance of natural long documents.
    """

    lengths: tuple[int, ...] = (512, 2048, 8192)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 4
    seed: int = 0
    max_new_tokens: int = 16
    filler: tuple[str, ...] = field(default=FILLER, repr=False)

    def __post_init__(self) -> None:
        if not self.lengths or not self.depths or self.samples < 1 or not self.filler:
            raise ValueError("lengths, depths, samples and filler must each hold at least one")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths are {self.depths}; each must be within 0 and 1")

    @property
    def digest(self) -> str:
        """The SHA-256 of everything that decides the prompts but the tokenizer."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Trial:
    """One prompt and what came of it."""

    length: int
    depth: float
    number: int
    retrieved: bool
    preferred: bool
    answer: str


@dataclass(frozen=True)
class LongContextReport:
    """The result of one model."""

    digest: str
    prefix_id: int
    """The id that stood once before every prompt."""
    trials: tuple[Trial, ...]

    def conditions(self) -> dict[str, object]:
        """What two reports must share to be compared."""
        return {"digest": self.digest}

    def rows(self) -> list[dict[str, Any]]:
        """One row per length and depth: how many prompts, and the share retrieved and preferred."""
        keys = sorted({(trial.length, trial.depth) for trial in self.trials})
        rows = []
        for length, depth in keys:
            trials = [trial for trial in self.trials if (trial.length, trial.depth) == (length, depth)]
            shares = {
                name: sum(getattr(trial, name) for trial in trials) / len(trials)
                for name in ("retrieved", "preferred")
            }
            rows.append({"length": length, "depth": depth, "n": len(trials), **shares})
        return rows

    def metrics(self) -> list[Metric]:
        """Both shares of each length."""
        results = []
        for length in sorted({trial.length for trial in self.trials}):
            trials = [trial for trial in self.trials if trial.length == length]
            units = tuple(f"{trial.length}/{trial.depth}/{trial.number}" for trial in trials)
            for name in ("retrieved", "preferred"):
                hits = tuple(float(getattr(trial, name)) for trial in trials)
                results.append(Metric(f"{length} tokens: {name}", units, hits, (1.0,) * len(units), True))
        return results

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return {
            "format": FORMAT,
            "digest": self.digest,
            "prefix_id": self.prefix_id,
            "n": len(self.trials),
            "cells": self.rows(),
            "trials": [asdict(trial) for trial in self.trials],
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "LongContextReport":
        """Read what ``as_dict`` wrote."""
        return cls(record["digest"], record["prefix_id"], tuple(Trial(**trial) for trial in record["trials"]))


def evaluate_long_context(
    model: ScoringModel,
    options: LongContextOptions | None = None,
    batching: Batching | None = None,
    progress: Progress | None = None,
) -> LongContextReport:
    """Ask for one fact in each cell's prompts.

    Args:
        model: the model.
        options: the layers.
        batching: batch size of the probabilities.
        progress: called with (prompts answered, prompts in all).

    Returns:
        The report.

    Raises:
        ValueError: a length does not fit the model, or is too short for the facts.
    """
    options = options or LongContextOptions()
    longest = max(options.lengths) + options.max_new_tokens
    if longest > model.max_length:
        raise ValueError(
            f"length {max(options.lengths)} and {options.max_new_tokens} new tokens are {longest} tokens, "
            "this model "
            f"takes {model.max_length}"
        )
    cells = [
        (length, depth, number)
        for length in options.lengths
        for depth in options.depths
        for number in range(options.samples)
    ]
    needles = [_needle(model, options, *cell) for cell in cells]
    preferred = _preferred(model, needles, batching)
    trials = []
    for done, (cell, needle, first) in enumerate(zip(cells, needles, preferred, strict=True), start=1):
        prompt = (model.prefix_id, *model.encode(needle.prompt))
        answer = model.decode(model.generate([prompt], options.max_new_tokens)[0])
        trials.append(Trial(*cell, retrieved(answer, needle.value), first, answer))
        if progress is not None:
            progress(done, len(cells))
    return LongContextReport(options.digest, model.prefix_id, tuple(trials))


def _needle(
    model: ScoringModel, options: LongContextOptions, length: int, depth: float, number: int
) -> Needle:
    rng = random.Random(cell_seed(options.seed, length, depth, number))
    return build_needle(model, options.filler, length, depth, rng)


def _preferred(model: ScoringModel, needles: Sequence[Needle], batching: Batching | None) -> list[bool]:
    """Compare each right value with the distractors of its text."""
    requests = [
        encode_pair(model, needle.prompt, f" {value}")
        for needle in needles
        for value in (needle.value, *needle.distractors)
    ]
    scores = iter(score_continuations(model, requests, batching))
    results = []
    for needle in needles:
        right = next(scores).log_probability
        others = [next(scores).log_probability for _ in needle.distractors]
        results.append(right > max(others))
    return results
