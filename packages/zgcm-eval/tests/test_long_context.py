import json
import random
import re

import pytest
import torch

from zgcm_eval import ScoringModel, TokenScores
from zgcm_eval.long_context import LongContextOptions, LongContextReport, evaluate_long_context
from zgcm_eval.needles import FILLER, PLACES, build_needle, retrieved, sentences_of

OPTIONS = LongContextOptions(lengths=(400, 900), depths=(0.0, 0.5, 1.0), samples=2)


class ReadingModel(ScoringModel):
    """Reads only the last ``span`` bytes of a prompt and copies the number of the place that is asked for."""

    prefix_id = 256
    max_length = 1000

    def __init__(self, span=10_000):
        self.span = span

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode()

    def number(self, prompt):
        text = self.decode([t for t in prompt if t < 256])
        asked = re.findall(r"What is the number of ([\w ]+)\?", text)[-1]
        found = re.search(rf"The number of {asked} is (\d+)\.", text[-self.span :])
        return found.group(1) if found else "0"

    def generate(self, prompts, max_new_tokens):
        return [self.encode(f" {self.number(prompt)}")[:max_new_tokens] for prompt in prompts]

    def token_scores(self, token_ids):
        values = torch.full((token_ids.shape[0], token_ids.shape[1] - 1), -5.0)
        for row, ids in enumerate(token_ids.tolist()):
            text = self.decode([t for t in ids if t < 256])
            if text.endswith(f" {self.number(ids)}"):
                values[row] = -0.1
        return TokenScores(values, torch.zeros(values.shape, dtype=torch.bool))


def test_a_model_that_reads_everything_retrieves_everything():
    report = evaluate_long_context(ReadingModel(), OPTIONS)
    assert len(report.rows()) == 6
    assert all(cell["retrieved"] == cell["preferred"] == 1.0 and cell["n"] == 2 for cell in report.rows())


def test_a_model_that_reads_only_the_end_fails_by_length_and_depth():
    report = evaluate_long_context(ReadingModel(span=380), OPTIONS)
    shares = {(cell["length"], cell["depth"]): cell["retrieved"] for cell in report.rows()}
    assert shares[900, 0.0] == shares[900, 0.5] == 0.0
    assert shares[400, 1.0] == shares[900, 1.0] == 1.0


def test_e10_the_right_value_in_another_sentence_counts():
    assert retrieved(" 48213.", "48213")
    assert retrieved("I looked it up, and for that place they wrote 48,213 there", "48213")


def test_e10_the_wrong_value_in_the_same_sentence_does_not_count():
    assert not retrieved("The number of Amber Bridge is 48214.", "48213")
    assert not retrieved("The number of Amber Bridge is 482135.", "48213")
    assert not retrieved("It is 11111, or perhaps 48213.", "48213")
    assert not retrieved("no idea", "48213")


@pytest.mark.parametrize("length", [230, 400, 777])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_prompt_fills_its_length_and_holds_each_fact_once(length, depth):
    model = ReadingModel()
    needle = build_needle(model, FILLER, length, depth, random.Random(3))
    used = len(model.encode(needle.prompt)) + 1
    assert length - max(map(len, FILLER)) - 2 < used <= length
    assert needle.prompt.count(needle.value) == 1
    assert len(set(needle.distractors)) == 3
    body = needle.prompt.split("\nQuestion")[0]
    if depth == 0.0:
        assert needle.value in body[:40]
    if depth == 1.0:
        assert needle.value in body[-120:]


def test_prompts_of_a_cell_do_not_depend_on_the_other_cells():
    narrow = LongContextOptions(lengths=(900,), depths=(0.5,), samples=2)
    wide, small = (evaluate_long_context(ReadingModel(), o) for o in (OPTIONS, narrow))
    answers = [t.answer for t in wide.trials if (t.length, t.depth) == (900, 0.5)]
    assert answers == [t.answer for t in small.trials]
    assert wide.digest != small.digest


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="are 1017 tokens, this model takes 1000"):
        evaluate_long_context(ReadingModel(), LongContextOptions(lengths=(1001,)))
    with pytest.raises(ValueError, match="length is 100 tokens; the facts and the question alone need more"):
        evaluate_long_context(ReadingModel(), LongContextOptions(lengths=(100,)))
    with pytest.raises(ValueError, match="each must be within 0 and 1"):
        LongContextOptions(depths=(1.5,))
    with pytest.raises(ValueError, match="must each hold at least one"):
        LongContextOptions(lengths=())


def test_natural_text_becomes_filler_without_numbers_that_look_like_values():
    assert sentences_of(["One. Two 12345 three. Four?\nFive"]) == ["One.", "Four?", "Five"]
    assert not [s for s in FILLER if re.search(r"\d", s)]
    assert len(set(PLACES)) == len(PLACES)


def test_a_report_survives_json():
    report = evaluate_long_context(ReadingModel(), OPTIONS)
    assert LongContextReport.from_dict(json.loads(json.dumps(report.as_dict()))) == report
    assert {metric.name: metric.value for metric in report.metrics()}["900 tokens: retrieved"] == 1.0
