"""Run the public benchmarks of lm-evaluation-harness; the only file that imports it.

The harness builds the prompts and reads the answers; this adapter gives it a model. Token boundaries,
truncation and the prefix id are those of ``zgcm_eval.continuation``: a continuation that is too long is
refused and never cut.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zgcm_eval.continuation import encode_pair, score_continuations
from zgcm_eval.frozen import HeldoutDocument, HeldoutSet
from zgcm_eval.heldout import HeldoutOptions, evaluate_heldout
from zgcm_eval.protocol import ScoringModel
from zgcm_eval.windows import Batching

DEFAULT_NEW_TOKENS = 256
"""Length of an answer where the task does not say one."""


@dataclass(frozen=True)
class TaskOptions:
    """What the harness is asked to do.

    Args:
        tasks: names of tasks or groups.
        shots: solved examples before each question; None leaves it to the task.
        limit: questions per task, for a quick look; None asks all.
        include: folder of task definitions of your own.
        batching: batch size and processes.
    """

    tasks: tuple[str, ...]
    shots: int | None = None
    limit: int | None = None
    include: str | None = None
    batching: Batching = field(default_factory=Batching)


class HarnessMethods:
    """The requests of the harness, answered by a ``ScoringModel``.

    Args:
        model: the model.
        batching: batch size and processes; every process must make the same requests.
    """

    def __init__(self, model: ScoringModel, batching: Batching) -> None:
        super().__init__()
        self._scored = model
        self._batching = batching

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Rate the continuation of each (context, continuation)."""
        pairs = [encode_pair(self._scored, *request.args) for request in requests]
        scores = score_continuations(self._scored, pairs, self._batching)
        return [(score.log_probability, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Rate each whole text; windows as in ``evaluate_heldout``."""
        texts = tuple(
            HeldoutDocument(str(number), request.args[0]) for number, request in enumerate(requests)
        )
        options = HeldoutOptions(tokens_per_batch=self._batching.tokens_per_batch)
        report = evaluate_heldout(
            self._scored, [HeldoutSet("rolling", texts)], options, group=self._batching.group
        )
        return [-score.nats for score in report.total.documents]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continue each context greedily up to one of its stop texts."""
        return [self._answer(*request.args) for request in requests]

    def _answer(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample") or (settings.get("temperature") or 0) > 0:
            raise ValueError(f"a task asks for sampling ({settings}); this model answers greedily only")
        length = int(settings.get("max_gen_toks", DEFAULT_NEW_TOKENS))
        room = self._scored.max_length - length - 1
        if room < 1:
            raise ValueError(
                f"max_gen_toks is {length}, this model takes {self._scored.max_length} tokens in all"
            )
        prompt = [self._scored.prefix_id, *self._scored.encode(context)[-room:]]
        answer = self._scored.decode(self._scored.generate([prompt], length)[0])
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else until
        return answer[: min((answer.find(stop) for stop in stops if stop in answer), default=len(answer))]


def harness_model(model: ScoringModel, batching: Batching | None = None) -> Any:
    """Make a model of the harness.

    Args:
        model: the model to measure.
        batching: batch size and processes.

    Returns:
        An ``lm_eval.api.model.LM``, for ``lm_eval.simple_evaluate(model=...)``.

    Raises:
        ImportError: lm-eval is not installed; the message names the extra.
    """
    base = _import("lm_eval.api.model").LM
    kind = type("ZgcmHarnessModel", (HarnessMethods, base), {"__doc__": HarnessMethods.__doc__})
    return kind(model, batching or Batching())


def run_tasks(model: ScoringModel, options: TaskOptions) -> dict[str, Any]:
    """Run tasks of the harness.

    Args:
        model: the model.
        options: tasks, examples, limit.

    Returns:
        ``results`` per task, ``versions``, ``n-samples`` and ``n-shot`` of the harness, and our
        ``prefix_id``.

    Raises:
        ImportError: lm-eval is not installed; the message names the extra.
        ValueError: the harness knows no such task.
    """
    harness = _import("lm_eval")
    manager = _import("lm_eval.tasks").TaskManager(include_path=options.include)
    unknown = [task for task in options.tasks if task not in manager.all_tasks]
    if unknown:
        raise ValueError(f"the harness has no task {unknown[0]!r}; `lm_eval ls tasks` lists what it has")
    found = harness.simple_evaluate(
        model=harness_model(model, options.batching),
        tasks=list(options.tasks),
        num_fewshot=options.shots,
        limit=options.limit,
        task_manager=manager,
        log_samples=False,
    )
    names = ("results", "versions", "n-samples", "n-shot")
    return {"prefix_id": model.prefix_id, **{name: found[name] for name in names if name in found}}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise ImportError(f'{name} is needed for benchmarks: pip install "zgcm-eval[harness]"') from error
