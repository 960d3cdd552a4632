import json
import math
from dataclasses import replace

import pytest
import torch

from zgcm_eval import HeldoutDocument, HeldoutOptions, HeldoutReport, HeldoutSet, evaluate_heldout
from zgcm_testing import run_ranks


def reference_nats(model, text, context, overlap):
    """Score token by token, each from its own prompt."""
    token_ids, total = model.encode(text), 0.0
    for position, token_id in enumerate(token_ids):
        start = 0
        if position >= context:
            stride = context - overlap
            start = context - overlap + (position - context) // stride * stride
        prompt = torch.tensor([[model.prefix_id, *token_ids[start:position]]])
        total -= float(model.logits(prompt)[0, -1].log_softmax(-1)[token_id])
    return total


@pytest.mark.parametrize(("context", "overlap"), [(64, 0), (16, 4), (7, 6), (1, 0)])
def test_nats_equal_the_token_by_token_reference(table_model, heldout_sets, context, overlap):
    report = evaluate_heldout(table_model, heldout_sets, HeldoutOptions(context, overlap))
    for heldout, domain in zip(heldout_sets, report.domains, strict=True):
        for document, score in zip(heldout.documents, domain.documents, strict=True):
            expected = reference_nats(table_model, document.text, context, overlap)
            assert score.nats == pytest.approx(expected, rel=1e-5)
            assert score.tokens == len(document.text.encode())


def test_bits_per_byte_divides_by_the_utf8_bytes_of_the_raw_text(uniform_model):
    model = uniform_model(256)
    model.encode = lambda text: list(text.encode("utf-16-le"))
    sets = [HeldoutSet("prose", (HeldoutDocument("a", "Größe"), HeldoutDocument("b", "Maß")))]
    domain = evaluate_heldout(model, sets).domains[0]
    assert (domain.tokens, domain.bytes) == (16, 11)
    assert domain.loss == pytest.approx(math.log(256), rel=1e-6)
    assert domain.bits_per_byte == pytest.approx(8 * 16 / 11, rel=1e-6)


def test_e12_perplexity_has_the_base_of_the_loss(uniform_model):
    report = evaluate_heldout(uniform_model(4), [HeldoutSet("d", (HeldoutDocument("a", "abcd"),))])
    assert report.domain("d").loss == pytest.approx(math.log(4))
    assert report.domain("d").perplexity == pytest.approx(4)
    assert report.domain("d").bits_per_byte == pytest.approx(2)


def test_e4_one_prefix_per_window_and_the_first_token_is_conditioned_on_it(table_model, heldout_sets):
    report = evaluate_heldout(table_model, heldout_sets, HeldoutOptions(context=16, overlap=4))
    rows = [row for batch in table_model.seen for row in batch.tolist()]
    assert all(row[0] == 256 for row in rows)
    # Padding is the prefix id as well: what counts is that none stands between two tokens of a document.
    stripped = [bytes(b if b < 256 else 0 for b in row).rstrip(b"\0") for row in rows]
    assert all(b"\0" not in row[1:] for row in stripped)
    assert (report.prefix_id, report.context, report.overlap) == (256, 16, 4)
    assert report.windows == len(rows)
    only = evaluate_heldout(table_model, [HeldoutSet("one", (HeldoutDocument("x", "a"),))])
    expected = table_model.logits(torch.tensor([[256]]))[0, 0].log_softmax(-1)[ord("a")]
    assert only.total.nats == pytest.approx(-float(expected), rel=1e-6)


def test_e4_a_tokenizer_that_adds_its_own_prefix_is_refused(table_model, heldout_sets):
    encode = table_model.encode
    table_model.encode = lambda text: [256, *encode(text)]
    with pytest.raises(ValueError, match=r"'code/0' encodes to the prefix id 256 at position 0"):
        evaluate_heldout(table_model, heldout_sets)


def test_e7_results_do_not_depend_on_the_batch_size(table_model, heldout_sets):
    options = HeldoutOptions(context=40, overlap=4)
    alone = evaluate_heldout(table_model, heldout_sets, replace(options, tokens_per_batch=1))
    together = evaluate_heldout(table_model, heldout_sets, replace(options, tokens_per_batch=10**6))
    for one, many in zip(alone.total.documents, together.total.documents, strict=True):
        assert one.nats == pytest.approx(many.nats, abs=1e-5)


def test_the_same_evaluation_twice_gives_the_same_digits(table_model, heldout_sets):
    assert evaluate_heldout(table_model, heldout_sets) == evaluate_heldout(table_model, heldout_sets)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_e6_results_do_not_depend_on_the_number_of_processes(table_model, heldout_sets, world):
    options = HeldoutOptions(context=32, overlap=8, tokens_per_batch=128)
    expected = evaluate_heldout(table_model, heldout_sets, options)

    def on_rank(rank, size):
        group = torch.distributed.group.WORLD
        return evaluate_heldout(table_model, heldout_sets, options, group=group)

    for report in run_ranks(on_rank, world):
        assert report == expected
        assert len(report.domain("code").documents) == 10


def test_e6_every_process_calls_the_model_equally_often(table_model, heldout_sets):
    def on_rank(rank, size):
        evaluate_heldout(table_model, heldout_sets, group=torch.distributed.group.WORLD)
        return len(table_model.seen)

    assert len(set(run_ranks(on_rank, 3))) == 1


def test_totals_are_sums_and_not_means_of_means(table_model, heldout_sets):
    report = evaluate_heldout(table_model, heldout_sets)
    assert report.total.tokens == sum(domain.tokens for domain in report.domains)
    assert report.total.loss == pytest.approx(sum(d.nats for d in report.domains) / report.total.tokens)
    with pytest.raises(ValueError, match=r"no domain 'math'.*'code', 'prose'"):
        report.domain("math")


def test_a_report_survives_json(table_model, heldout_sets):
    report = evaluate_heldout(table_model, heldout_sets)
    record = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert HeldoutReport.from_dict(record) == report
    assert record["prefixes_per_window"] == 1
    assert record["domains"]["code"] == report.domain("code").as_dict()
    record["domains"]["code"]["loss"] -= 0.1
    with pytest.raises(ValueError, match="do not follow from its documents"):
        HeldoutReport.from_dict(record)
    with pytest.raises(ValueError, match="format is None"):
        HeldoutReport.from_dict({})


def test_the_digest_tells_other_texts_and_other_names(table_model, heldout_sets):
    digests = {
        evaluate_heldout(table_model, sets).digest
        for sets in (
            heldout_sets,
            heldout_sets[:1],
            [replace(heldout_sets[0], name="c")],
            [HeldoutSet("code", (HeldoutDocument("code/0", "x"),))],
        )
    }
    assert len(digests) == 4


def test_an_empty_document_counts_no_token_and_an_empty_set_is_refused(table_model):
    sets = [HeldoutSet("d", (HeldoutDocument("a", ""), HeldoutDocument("b", "xy")))]
    domain = evaluate_heldout(table_model, sets).domains[0]
    assert (domain.documents[0].tokens, domain.documents[0].nats) == (0, 0.0)
    with pytest.raises(ValueError, match="held-out set 'd' has no text"):
        evaluate_heldout(table_model, [HeldoutSet("d", (HeldoutDocument("a", ""),))])


def test_a_context_beyond_the_model_is_refused(table_model, heldout_sets):
    with pytest.raises(ValueError, match="context is 65; this model takes 1 to 64 tokens"):
        evaluate_heldout(table_model, heldout_sets, HeldoutOptions(context=65))


def test_a_broken_model_is_reported_and_not_averaged(table_model, heldout_sets):
    table_model.table[:] = float("nan")
    with pytest.raises(ValueError, match=r"'code/0' of 'code' has the loss nan"):
        evaluate_heldout(table_model, heldout_sets)


def test_perplexity_of_a_hopeless_model_is_infinite(uniform_model):
    report = evaluate_heldout(uniform_model(10**400), [HeldoutSet("d", (HeldoutDocument("a", "ab"),))])
    assert report.total.perplexity == math.inf
    assert report.total.bits_per_byte == pytest.approx(400 / math.log10(2), rel=1e-5)
