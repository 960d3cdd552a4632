"""Questions with a few possible answers: the answer that the model finds most probable counts.

Two accuracies are reported, because neither is right for every task: by the sum of log-probabilities, and
by the sum per UTF-8 byte of the choice, which does not favour short ones. The choices of a question are
rated from the same token on, so that a choice which merges with the end of the question is not rated on
more text than another.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zgcm_eval.continuation import ContinuationScore, Request, score_continuations, shared_prefix, split_at
from zgcm_eval.metrics import Metric
from zgcm_eval.protocol import LanguageModel, ScoringModel
from zgcm_eval.windows import Batching, Progress

FORMAT = "zgcm-choices-report/1"
"""Value of ``format`` in a report."""


@dataclass(frozen=True)
class Question:
    """One question, its choices and the index of the right one.

    Args:
        id: unique within a task.
        text: what stands before a choice, for instance ``"Q: 1+1?\\nA:"``.
        choices: what may follow, with a leading space where one belongs.
        answer: index of the right choice.
    """

    id: str
    text: str
    choices: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        if len(set(self.choices)) < 2 or len(set(self.choices)) != len(self.choices) or "" in self.choices:
            raise ValueError(f"question {self.id!r} needs two or more different choices: {self.choices!r}")
        if not 0 <= self.answer < len(self.choices):
            last = len(self.choices) - 1
            raise ValueError(f"question {self.id!r} has answer {self.answer}; give 0 to {last}")


@dataclass(frozen=True)
class Task:
    """Questions with what stands before each of them.

    Args:
        name: of the task.
        questions: what is asked.
        description: first part of every prompt; never cut.
        shots: solved examples between description and question; whole ones are left out, the first first,
            where they do not fit.
    """

    name: str
    questions: tuple[Question, ...]
    description: str = ""
    shots: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The SHA-256 of all that is asked."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class AnsweredQuestion:
    """How the choices of one question were rated."""

    id: str
    answer: int
    log_probabilities: tuple[float, ...]
    choice_bytes: tuple[int, ...]
    shots: int
    """Solved examples that stood before the question."""

    @property
    def right(self) -> bool:
        """Whether the right choice has the highest log-probability."""
        return _argmax(self.log_probabilities) == self.answer

    @property
    def right_per_byte(self) -> bool:
        """Whether the right choice has the highest log-probability per byte."""
        rates = [value / size for value, size in zip(self.log_probabilities, self.choice_bytes, strict=True)]
        return _argmax(rates) == self.answer


@dataclass(frozen=True)
class ChoicesReport:
    """The result of one model on one task."""

    task: str
    digest: str
    prefix_id: int
    """The id that stood once before every prompt."""
    questions: tuple[AnsweredQuestion, ...]

    @property
    def accuracy(self) -> float:
        """Share of right answers by the sum of log-probabilities."""
        return sum(question.right for question in self.questions) / len(self.questions)

    @property
    def accuracy_per_byte(self) -> float:
        """Share of right answers by log-probability per byte."""
        return sum(question.right_per_byte for question in self.questions) / len(self.questions)

    def conditions(self) -> dict[str, object]:
        """What two reports must share to be compared."""
        return {"digest": self.digest}

    def rows(self) -> list[dict[str, Any]]:
        """One row."""
        names = ("task", "n", "accuracy", "accuracy_per_byte", "shots_fewest", "shots_most")
        record = self.as_dict()
        return [{name: record[name] for name in names}]

    def metrics(self) -> list[Metric]:
        """Both accuracies with their questions."""
        units = tuple(question.id for question in self.questions)
        ones = (1.0,) * len(units)
        right = tuple(float(question.right) for question in self.questions)
        per_byte = tuple(float(question.right_per_byte) for question in self.questions)
        return [
            Metric(f"{self.task}: accuracy", units, right, ones, True),
            Metric(f"{self.task}: accuracy per byte", units, per_byte, ones, True),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        shots = [question.shots for question in self.questions]
        return {
            "format": FORMAT,
            "task": self.task,
            "digest": self.digest,
            "prefix_id": self.prefix_id,
            "n": len(self.questions),
            "accuracy": self.accuracy,
            "accuracy_per_byte": self.accuracy_per_byte,
            "shots_fewest": min(shots),
            "shots_most": max(shots),
            "questions": [asdict(question) for question in self.questions],
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "ChoicesReport":
        """Read what ``as_dict`` wrote."""
        questions = tuple(
            AnsweredQuestion(
                q["id"], q["answer"], tuple(q["log_probabilities"]), tuple(q["choice_bytes"]), q["shots"]
            )
            for q in record["questions"]
        )
        return cls(record["task"], record["digest"], record["prefix_id"], questions)


def evaluate_choices(
    model: ScoringModel,
    task: Task,
    batching: Batching | None = None,
    progress: Progress | None = None,
) -> ChoicesReport:
    """Answer every question of a task.

    Args:
        model: the model.
        task: the questions.
        batching: batch size and processes.
        progress: called with (batches done, batches in all).

    Returns:
        The report.

    Raises:
        ValueError: there is no question, one does not fit even without examples, or the log-probabilities
            cannot come from a language model.
    """
    if not task.questions:
        raise ValueError(f"task {task.name!r} has no question; its accuracy would be 0/0")
    prepared = [_requests(model, task, question) for question in task.questions]
    flat = [request for requests, _ in prepared for request in requests]
    scores = iter(score_continuations(model, flat, batching, progress))
    answered = []
    for question, (requests, shots) in zip(task.questions, prepared, strict=True):
        values = tuple(_sane(question, next(scores)) for _ in requests)
        sizes = tuple(len(choice.encode("utf-8")) for choice in question.choices)
        answered.append(AnsweredQuestion(question.id, question.answer, values, sizes, shots))
    _check_spread(task, answered)
    return ChoicesReport(task.name, task.digest, model.prefix_id, tuple(answered))


def _requests(model: LanguageModel, task: Task, question: Question) -> tuple[list[Request], int]:
    """Encode the choices with as many examples as fit; returns the number of examples too."""
    for dropped in range(len(task.shots) + 1):
        context = "".join((task.description, *task.shots[dropped:], question.text))
        together = [model.encode(context + choice) for choice in question.choices]
        if max(map(len, together)) <= model.max_length:
            alone = model.encode(context.rstrip())
            start = min(shared_prefix(alone, token_ids) for token_ids in together)
            return [split_at(token_ids, start) for token_ids in together], len(task.shots) - dropped
    raise ValueError(
        f"question {question.id!r} of {task.name!r} has {max(map(len, together))} tokens with the "
        "description and "
        f"without examples, this model takes {model.max_length}; leave it out or use a longer context"
    )


def _sane(question: Question, score: ContinuationScore) -> float:
    if not score.log_probability <= 1e-3:
        raise ValueError(
            f"a choice of question {question.id!r} has log-probability {score.log_probability}; "
            "the model does not return logarithms of probabilities"
        )
    return min(score.log_probability, 0.0)


def _check_spread(task: Task, answered: Sequence[AnsweredQuestion]) -> None:
    if all(len(set(question.log_probabilities)) == 1 for question in answered):
        raise ValueError(
            f"every choice of every question of {task.name!r} got the same log-probability; the model rates "
            "nothing"
        )


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
