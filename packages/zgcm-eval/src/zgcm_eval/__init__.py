"""Held-out loss, bits per byte and comparisons of language models, each on a frozen set.

Start with ``load_heldout`` and ``evaluate_heldout``. Any object with the methods of ``LanguageModel`` can be
measured.
"""

from zgcm_eval._version import __version__
from zgcm_eval.frozen import HeldoutDocument, HeldoutSet, HeldoutSetError, freeze_heldout, load_heldout
from zgcm_eval.heldout import HeldoutOptions, evaluate_heldout
from zgcm_eval.heldout_report import DocumentScore, DomainResult, HeldoutReport
from zgcm_eval.protocol import LanguageModel, ScoringModel, TokenScores

__all__ = [
    "DocumentScore",
    "DomainResult",
    "HeldoutDocument",
    "HeldoutOptions",
    "HeldoutReport",
    "HeldoutSet",
    "HeldoutSetError",
    "LanguageModel",
    "ScoringModel",
    "TokenScores",
    "__version__",
    "evaluate_heldout",
    "freeze_heldout",
    "load_heldout",
]
