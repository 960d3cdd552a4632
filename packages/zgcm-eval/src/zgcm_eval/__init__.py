"""Held-out loss, bits per byte and comparisons of language models, each on a frozen set.

Start with ``load_heldout`` and ``evaluate_heldout``. Any object with the methods of ``LanguageModel`` can be
measured; ``zgcm_eval.adapters`` holds the ready ones. ``compare_reports`` tells two checkpoints apart.
"""

from zgcm_eval._version import __version__
from zgcm_eval.compare import CompareOptions, Comparison, MetricComparison, compare_reports
from zgcm_eval.continuation import ContinuationScore, Request, encode_pair, score_continuations
from zgcm_eval.frozen import HeldoutDocument, HeldoutSet, HeldoutSetError, freeze_heldout, load_heldout
from zgcm_eval.heldout import HeldoutOptions, evaluate_heldout
from zgcm_eval.heldout_report import DocumentScore, DomainResult, HeldoutReport
from zgcm_eval.long_context import LongContextOptions, LongContextReport, evaluate_long_context
from zgcm_eval.memorization import MemorizationOptions, MemorizationReport, Sample, evaluate_memorization
from zgcm_eval.metrics import Metric, Report
from zgcm_eval.multiple_choice import ChoicesReport, Question, Task, evaluate_choices
from zgcm_eval.protocol import LanguageModel, ScoringModel, TokenScores
from zgcm_eval.report import read_report, write_report
from zgcm_eval.windows import Batching

__all__ = [
    "Batching",
    "ChoicesReport",
    "CompareOptions",
    "Comparison",
    "ContinuationScore",
    "DocumentScore",
    "DomainResult",
    "HeldoutDocument",
    "HeldoutOptions",
    "HeldoutReport",
    "HeldoutSet",
    "HeldoutSetError",
    "LanguageModel",
    "LongContextOptions",
    "LongContextReport",
    "MemorizationOptions",
    "MemorizationReport",
    "Metric",
    "MetricComparison",
    "Question",
    "Report",
    "Request",
    "Sample",
    "ScoringModel",
    "Task",
    "TokenScores",
    "__version__",
    "compare_reports",
    "encode_pair",
    "evaluate_choices",
    "evaluate_heldout",
    "evaluate_long_context",
    "evaluate_memorization",
    "freeze_heldout",
    "load_heldout",
    "read_report",
    "score_continuations",
    "write_report",
]
