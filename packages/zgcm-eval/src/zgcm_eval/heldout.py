r"""Loss, perplexity and bits per byte on held-out text, per domain.

With l the natural logarithm of the probability that the model gives a token, and sums over every token of
every document of a domain:

    loss          = -sum(l) / tokens            nats per token
    perplexity    = exp(loss)
    bits per byte = -sum(l) / (ln 2 * bytes)    bytes: UTF-8 bytes of the raw text

Loss and perplexity depend on the tokenizer; bits per byte does not, so only bits per byte compares models
with different tokenizers. The first token of a document is conditioned on one end-of-document id, as in
training on concatenated documents; no end-of-document id is scored. See ``zgcm_eval.windows`` for documents
longer than the context.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from zgcm_eval.frozen import HeldoutDocument, HeldoutSet
from zgcm_eval.heldout_report import DocumentScore, DomainResult, HeldoutReport
from zgcm_eval.protocol import LanguageModel
from zgcm_eval.windows import Batching, Progress, Window, cut_windows, score_windows, summed_log_probability


@dataclass(frozen=True)
class HeldoutOptions:
    """How documents longer than the model's context are cut, and how much is scored at once.

    Args:
        context: tokens of a document in one window; None takes the model's longest input.
        overlap: tokens that a later window repeats as context; None takes a quarter of the context.
        tokens_per_batch: padded tokens of one forward pass. It does not change the result.
    """

    context: int | None = None
    overlap: int | None = None
    tokens_per_batch: int = 4096


def evaluate_heldout(
    model: LanguageModel,
    sets: Sequence[HeldoutSet],
    options: HeldoutOptions | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> HeldoutReport:
    """Score every token of every document exactly once.

    Args:
        model: the model; its ``encode`` must add no special token.
        sets: the frozen sets, for instance of ``load_heldout``.
        options: windows and batch size.
        group: processes that share the work; every one of them must call this and gets the whole report.
        progress: called with (batches done, batches in all).

    Returns:
        The report; the same to 1e-5 whatever the batch size and the number of processes.

    Raises:
        ValueError: a set is empty, the context does not fit the model, a text encodes to the prefix id, or
            a loss is not finite.
    """
    options = options or HeldoutOptions()
    context = _context(model, options)
    overlap = options.overlap if options.overlap is not None else context // 4
    documents = [document for heldout in sets for document in _checked(heldout).documents]
    encoded = [_encode(model, document) for document in documents]
    windows = [
        window
        for item, token_ids in enumerate(encoded)
        for window in cut_windows(item, token_ids, model.prefix_id, context, overlap)
    ]
    nats = _negative_log_likelihoods(
        model, windows, len(documents), Batching(options.tokens_per_batch, group), progress
    )
    scores = iter(
        DocumentScore(document.id, len(token_ids), document.bytes, value)
        for document, token_ids, value in zip(documents, encoded, nats, strict=True)
    )
    domains = tuple(_domain_result(heldout, [next(scores) for _ in heldout.documents]) for heldout in sets)
    return HeldoutReport(domains, model.prefix_id, context, overlap, len(windows))


def _context(model: LanguageModel, options: HeldoutOptions) -> int:
    context = options.context if options.context is not None else model.max_length
    if not 1 <= context <= model.max_length:
        raise ValueError(f"context is {context}; this model takes 1 to {model.max_length} tokens")
    return context


def _checked(heldout: HeldoutSet) -> HeldoutSet:
    if not any(document.text for document in heldout.documents):
        raise ValueError(f"held-out set {heldout.name!r} has no text; its loss would be 0/0")
    return heldout


def _encode(model: LanguageModel, document: HeldoutDocument) -> list[int]:
    token_ids = model.encode(document.text)
    if model.prefix_id in token_ids:
        raise ValueError(
            f"document {document.id!r} encodes to the prefix id {model.prefix_id} at position "
            f"{token_ids.index(model.prefix_id)}; encode() must add no special token and read none from text"
        )
    return token_ids


def _negative_log_likelihoods(
    model: LanguageModel, windows: Sequence[Window], count: int, batching: Batching, progress: Progress | None
) -> list[float]:
    """Sum the windows of each document, in the order of the windows."""

    def score(token_ids: Int[Tensor, "B T"], scored: Bool[Tensor, "B S"]) -> Float[Tensor, "B 1"]:
        return summed_log_probability(model.log_probabilities(token_ids), scored).unsqueeze(1)

    sums = score_windows(windows, score, model.prefix_id, batching, progress)[:, 0]
    nats = [0.0] * count
    for window, value in zip(windows, sums.tolist(), strict=True):
        nats[window.item] -= value
    return nats


def _domain_result(heldout: HeldoutSet, scores: list[DocumentScore]) -> DomainResult:
    for score in scores:
        if not math.isfinite(score.nats):
            raise ValueError(
                f"document {score.id!r} of {heldout.name!r} has the loss {score.nats}; "
                "the model's weights or activations are not finite"
            )
    return DomainResult(heldout.name, heldout.sha256, tuple(scores))
