"""The adapter's answers without the harness; tests/extras runs a task of the real one."""

from types import SimpleNamespace

import pytest
import torch

from zgcm_eval import HeldoutDocument, HeldoutSet, evaluate_heldout
from zgcm_eval.adapters.lm_eval import HarnessMethods
from zgcm_eval.windows import Batching
from zgcm_testing import run_ranks


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


@pytest.fixture
def harness(table_model):
    return HarnessMethods(table_model, Batching())


def test_e1_loglikelihood_rates_the_continuation_and_marks_the_greedy_one(harness, table_model):
    best = bytes(table_model.generate([[256, *b"go"]], 2)[0]).decode("latin-1")
    table_model.encode = lambda text: list(text.encode("latin-1"))
    (good, greedy), (other, not_greedy) = harness.loglikelihood(requests(("go", best), ("go", "zz")))
    assert (greedy, not_greedy) == (True, False)
    assert other < good < 0
    logits = table_model.logits(torch.tensor([[256, *b"go", *best.encode("latin-1")]]))[0].log_softmax(-1)
    expected = sum(float(logits[2 + n, ord(c)]) for n, c in enumerate(best))
    assert good == pytest.approx(expected, abs=1e-5)
    assert harness.loglikelihood(requests(("", "a")))[0][0] < 0


def test_rolling_equals_the_held_out_evaluation(harness, table_model):
    texts = ["a" * 100, "", "short"]
    sets = [HeldoutSet("s", tuple(HeldoutDocument(str(n), text) for n, text in enumerate(texts)))]
    expected = [-d.nats for d in evaluate_heldout(table_model, sets).total.documents]
    assert harness.loglikelihood_rolling(requests(*((text,) for text in texts))) == expected


def test_generation_ends_at_the_first_stop_text(harness, table_model):
    table_model.generate = lambda prompts, count: [list(b"one. two\n\nthree")[:count]]
    settings = {"until": ["\n\n", ". "], "max_gen_toks": 40}
    full = {"until": [], "max_gen_toks": 40, "temperature": 0.0, "do_sample": False}
    assert harness.generate_until(requests(("q", settings), ("q", full))) == ["one", "one. two\n\nthree"]
    assert harness.generate_until(requests(("q", {"until": "two", "max_gen_toks": 40}))) == ["one. "]


def test_a_long_context_loses_its_beginning_and_keeps_one_prefix(harness, table_model):
    prompts = []
    table_model.generate = lambda batch, count: prompts.extend(batch) or [[65]]
    harness.generate_until(requests(("x" * 60 + "end", {"max_gen_toks": 40})))
    assert prompts == [[256, *b"x" * 20, *b"end"]]


def test_sampling_and_answers_longer_than_the_model_are_refused(harness):
    for settings in ({"do_sample": True}, {"temperature": 0.7}):
        with pytest.raises(ValueError, match="answers greedily only"):
            harness.generate_until(requests(("q", settings)))
    with pytest.raises(ValueError, match="max_gen_toks is 256, this model takes 64"):
        harness.generate_until(requests(("q", {"until": ["\n"]})))


def test_e6_the_same_answers_on_every_number_of_processes(table_model):
    asked = requests(*((f"Q{n}", f" {n * n}") for n in range(10)))
    expected = HarnessMethods(table_model, Batching(40)).loglikelihood(asked)

    def on_rank(rank, world):
        return HarnessMethods(table_model, Batching(40, torch.distributed.group.WORLD)).loglikelihood(asked)

    assert run_ranks(on_rank, 3) == [expected] * 3
