import json
from dataclasses import replace

import pytest
import torch

from zgcm_eval.continuation import Request, encode_pair, score_continuations
from zgcm_eval.multiple_choice import ChoicesReport, Question, Task, evaluate_choices
from zgcm_eval.windows import Batching
from zgcm_testing import run_ranks


def merging(words):
    """Encode text greedily with whole words where one fits; ids from 300 on are words."""

    def encode(text):
        token_ids = []
        while text:
            word = next((w for w in words if text.startswith(w)), None)
            token_ids += [300 + words.index(word)] if word else list(text[0].encode())
            text = text[len(word or text[0]) :]
        return token_ids

    return encode


def test_e1_a_token_that_spans_context_and_continuation_is_scored(table_model):
    table_model.encode = merging(["Answer", "Ans"])
    assert encode_pair(table_model, "Ans", "wer") == Request((), (300,))
    assert encode_pair(table_model, "x Ans", "wer!") == Request(tuple(b"x "), (300, ord("!")))


def test_e1_a_single_token_uses_exactly_one_logit(table_model):
    request = encode_pair(table_model, "The answer is", "b")
    assert request.continuation == (ord("b"),)
    score = score_continuations(table_model, [request])[0]
    logits = table_model.logits(torch.tensor([[256, *b"The answer is"]]))[0, -1]
    assert score.log_probability == pytest.approx(float(logits.log_softmax(-1)[ord("b")]), abs=1e-5)
    assert score.tokens == 1


def test_e1_trailing_space_of_the_context_moves_to_the_continuation(table_model):
    request = encode_pair(table_model, "A: \n", "yes")
    assert request == Request(tuple(b"A:"), tuple(b" \nyes"))
    assert encode_pair(table_model, "  ", "yes") == Request((), tuple(b"  yes"))
    with pytest.raises(ValueError, match="is empty"):
        encode_pair(table_model, "A:", "")


def test_e1_greedy_flag_is_right(table_model):
    prompt = [256, *b"go"]
    best = table_model.generate([prompt], 3)[0]
    other = [*best[:-1], (best[-1] + 1) % 256]
    scores = score_continuations(
        table_model, [Request(tuple(b"go"), tuple(best)), Request(tuple(b"go"), tuple(other))]
    )
    assert [score.greedy for score in scores] == [True, False]


def test_e2_truncation_keeps_the_continuation_whole_and_is_reported(table_model_class):
    model = table_model_class(max_length=3)
    request = encode_pair(model, "abc", "de")
    score = score_continuations(model, [request])[0]
    assert (score.tokens, score.truncated) == (2, True)
    logits = model.logits(torch.tensor([[256, *b"cd"]]))[0].log_softmax(-1)
    expected = float(logits[1, ord("d")] + logits[2, ord("e")])
    assert score.log_probability == pytest.approx(expected, abs=1e-5)
    assert not score_continuations(model, [encode_pair(model, "c", "de")])[0].truncated
    # With no room left for the context, only the prefix stands before the continuation.
    assert score_continuations(model, [encode_pair(model, "abc", "def")])[0].tokens == 3
    with pytest.raises(ValueError, match="continuation 0 has 4 tokens, this model takes 1 to 3"):
        score_continuations(model, [encode_pair(model, "abc", "defg")])


def test_e7_a_short_item_beside_a_long_one_scores_the_same(table_model_class):
    model = table_model_class(order=4)
    short, long = encode_pair(model, "a", "b"), encode_pair(model, "x" * 50, "yz")
    alone = score_continuations(model, [short])[0]
    beside = score_continuations(model, [long, short], Batching(tokens_per_batch=10_000))[1]
    assert alone.log_probability == pytest.approx(beside.log_probability, abs=1e-5)


@pytest.fixture
def task():
    questions = tuple(
        Question(f"q{n}", f"Q: {n}+{n}?\nA:", (f" {2 * n}", f" {2 * n + 1}", " no", " yes"), n % 4)
        for n in range(10)
    )
    return Task("sums", questions, "Add.\n", ("Q: 0+1?\nA: 1\n", "Q: 1+2?\nA: 3\n"))


def test_e6_accuracy_is_the_same_on_every_number_of_processes(table_model, task):
    expected = evaluate_choices(table_model, task, Batching(200))
    assert (expected.as_dict()["n"], expected.as_dict()["prefix_id"]) == (10, 256)
    for world in (2, 3, 4):

        def on_rank(rank, size):
            return evaluate_choices(table_model, task, Batching(200, torch.distributed.group.WORLD))

        assert run_ranks(on_rank, world) == [expected] * world


def test_e13_whole_examples_go_first_and_the_description_stays(table_model_class, task):
    longest = max(len(q.text) + max(map(len, q.choices)) for q in task.questions)
    for room, shots in ((longest + 5 + 26, 2), (longest + 5 + 25, 1), (longest + 5, 0)):
        model = table_model_class(max_length=room)
        report = evaluate_choices(model, task)
        assert report.as_dict()["shots_fewest"] == shots
        rows = [bytes(t for t in row if t < 256) for batch in model.seen for row in batch.tolist()]
        assert all(row.startswith(b"Add.\n") for row in rows)
    with pytest.raises(ValueError, match=r"question 'q\d' of 'sums' has \d+ tokens with the description"):
        evaluate_choices(table_model_class(max_length=longest + 4), task)


def test_e14_a_random_model_gives_distinct_negative_numbers(table_model, task):
    report = evaluate_choices(table_model, task)
    for question in report.questions:
        assert len(set(question.log_probabilities)) == 4
        assert all(value < 0 for value in question.log_probabilities)


def test_e14_log_likelihoods_that_are_all_equal_or_positive_are_refused(table_model, task):
    real = table_model.token_scores

    def constant(value):
        def scores(token_ids):
            rated = real(token_ids)
            return rated._replace(log_probabilities=torch.full_like(rated.log_probabilities, value))

        return scores

    table_model.token_scores = constant(0.0)
    with pytest.raises(ValueError, match="the same log-probability; the model rates nothing"):
        evaluate_choices(table_model, task)
    for value in (0.5, float("nan")):
        table_model.token_scores = constant(value)
        with pytest.raises(ValueError, match="does not return logarithms of probabilities"):
            evaluate_choices(table_model, task)


def test_choices_are_rated_on_the_same_text(table_model):
    # "is" joins with "n't" alone; both choices must then be rated from "is" on.
    table_model.encode = merging(["isn't"])
    table_model.table = torch.zeros(997, 400)
    question = Question("q", "it is", ("n't", "!!!"), 0)
    report = evaluate_choices(table_model, Task("t", (question,)))
    per_token = -torch.tensor(400.0).log().item()
    assert report.questions[0].log_probabilities == pytest.approx((per_token, 5 * per_token), rel=1e-5)


def test_accuracy_per_byte_does_not_favour_the_short_choice(uniform_model):
    question = Question("q", "Q:", (" a", " a long one"), 1)
    model = uniform_model(256)
    real = model.token_scores

    def scores(token_ids):
        rated = real(token_ids)
        values = torch.where(token_ids[:, 1:] == ord("a"), -3.0, -2.0)
        return rated._replace(log_probabilities=values)

    model.token_scores = scores
    report = evaluate_choices(model, Task("t", (question,)))
    assert (report.accuracy, report.accuracy_per_byte) == (0.0, 1.0)


def test_a_report_survives_json_and_its_digest_tells_the_task(table_model, task):
    report = evaluate_choices(table_model, task)
    assert ChoicesReport.from_dict(json.loads(json.dumps(report.as_dict()))) == report
    assert replace(task, description="Sum.\n").digest != report.digest == task.digest
    assert [metric.value for metric in report.metrics()] == [report.accuracy, report.accuracy_per_byte]


@pytest.mark.parametrize(
    ("choices", "answer"), [((" a",), 0), ((" a", " a"), 0), ((" a", ""), 0), ((" a", " b"), 2)]
)
def test_a_question_that_cannot_be_answered_is_refused(choices, answer):
    with pytest.raises(ValueError, match="question 'q'"):
        Question("q", "Q:", choices, answer)


def test_a_task_without_questions_is_refused(table_model):
    with pytest.raises(ValueError, match="has no question"):
        evaluate_choices(table_model, Task("none", ()))
