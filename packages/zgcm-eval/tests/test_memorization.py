import json
import random

import pytest

from zgcm_eval import LanguageModel
from zgcm_eval.memorization import (
    MemorizationOptions,
    MemorizationReport,
    Sample,
    evaluate_memorization,
)


class ReplayModel(LanguageModel):
    """Continues a prompt as its training stream did, and answers any other prompt with zeros."""

    prefix_id = 999
    max_length = 128

    def __init__(self, documents):
        self.streams = [(self.prefix_id, *document) for document in documents]

    def generate(self, prompts, max_new_tokens):
        results = []
        for prompt in prompts:
            stream = next((s for s in self.streams if s[: len(prompt)] == tuple(prompt)), ())
            results.append(list(stream[len(prompt) :][:max_new_tokens]) or [0] * max_new_tokens)
        return results


def documents(count, length, seed=0):
    rng = random.Random(seed)
    return [tuple(rng.randrange(1, 900) for _ in range(length)) for _ in range(count)]


def samples(docs):
    return [Sample(f"d{n}", doc) for n, doc in enumerate(docs)]


def test_e11_trained_documents_come_back_and_permuted_ones_do_not():
    trained = documents(20, 80)
    model = ReplayModel(trained)
    report = evaluate_memorization(model, samples(trained))
    assert (report.exact, report.partial) == (1.0, 1.0)
    permuted = [tuple(random.Random(1).sample(doc, len(doc))) for doc in trained]
    report = evaluate_memorization(model, samples(permuted))
    assert (report.exact, report.partial) == (0.0, 0.0)


def test_e11_a_prefix_that_does_not_start_where_training_did_finds_nothing():
    trained = documents(5, 100)
    shifted = [doc[1:] for doc in trained]
    assert evaluate_memorization(ReplayModel(trained), samples(shifted)).exact == 0.0


def test_e11_short_documents_are_left_out_and_counted():
    docs = [*documents(3, 64), *documents(4, 63, seed=1)]
    report = evaluate_memorization(ReplayModel(docs), samples(docs))
    assert (len(report.samples), report.too_short, report.exact) == (3, 4, 1.0)
    with pytest.raises(ValueError, match="none of the 4 samples has 64 tokens"):
        evaluate_memorization(ReplayModel(docs), samples(docs[3:]))


def test_e11_a_near_miss_at_the_last_token_is_not_exact():
    trained = documents(1, 64)
    asked = [(*trained[0][:-1], 901)]
    report = evaluate_memorization(ReplayModel(trained), samples(asked))
    assert (report.exact, report.partial) == (0.0, 31 / 32)


def test_a_continuation_that_ends_early_matches_nothing_after_its_end():
    trained = documents(1, 50)
    report = evaluate_memorization(ReplayModel(trained), samples([trained[0] + (5,) * 20]))
    assert report.samples[0].matched == 18


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_the_batch_changes_nothing_but_the_number_of_calls(batch):
    docs = documents(7, 64)
    steps = []
    report = evaluate_memorization(
        ReplayModel(docs[:4]),
        samples(docs),
        MemorizationOptions(batch=batch),
        lambda done, total: steps.append((done, total)),
    )
    assert report.exact == 4 / 7
    assert steps[-1] == (-(-7 // batch), -(-7 // batch))


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="prefix is 0"):
        MemorizationOptions(prefix=0)
    with pytest.raises(ValueError, match="have 132 tokens, this model takes 128"):
        evaluate_memorization(ReplayModel([]), [], MemorizationOptions(prefix=100))


def test_a_report_survives_json_and_its_digest_tells_the_samples():
    docs = documents(4, 64)
    report = evaluate_memorization(ReplayModel(docs[:2]), samples(docs))
    assert MemorizationReport.from_dict(json.loads(json.dumps(report.as_dict()))) == report
    assert [metric.value for metric in report.metrics()] == [report.exact, report.partial]
    assert evaluate_memorization(ReplayModel(docs), samples(docs)).digest == report.digest
    assert evaluate_memorization(ReplayModel(docs), samples(docs[1:])).digest != report.digest
