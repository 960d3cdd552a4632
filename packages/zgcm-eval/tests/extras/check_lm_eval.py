"""Runs with the extra [harness] installed: ``pytest packages/zgcm-eval/tests/extras/check_lm_eval.py``.

A task of our own, read from a file of this test, goes through the real harness without a network.
"""

import json

import pytest
from lm_eval.api.model import LM

from zgcm_eval.adapters.lm_eval import TaskOptions, harness_model, run_tasks
from zgcm_eval.multiple_choice import Question, Task, evaluate_choices

CHOICES = [" yes", " no", " perhaps", " never"]
TASK = """
task: zgcm_small
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture
def questions(tmp_path):
    return [{"question": f"Q: is {n} odd?\nA:", "choices": CHOICES, "answer": n % 4} for n in range(10)]


@pytest.fixture
def folder(tmp_path, questions, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tmp_path / "task.yaml").write_text(TASK.replace("FILE", str(data)))
    return tmp_path


def test_the_harness_and_our_own_evaluation_agree(table_model, folder, questions):
    found = run_tasks(table_model, TaskOptions(("zgcm_small",), include=str(folder)))
    own = Task(
        "own",
        tuple(Question(str(n), q["question"], tuple(CHOICES), q["answer"]) for n, q in enumerate(questions)),
    )
    report = evaluate_choices(table_model, own)
    assert found["results"]["zgcm_small"]["acc,none"] == pytest.approx(report.accuracy)
    assert found["n-samples"]["zgcm_small"]["effective"] == 10
    assert found["prefix_id"] == 256


def test_an_unknown_task_is_refused(table_model):
    with pytest.raises(ValueError, match="no task 'nothing-like-it'"):
        run_tasks(table_model, TaskOptions(("nothing-like-it",)))


def test_it_is_a_model_of_the_harness(table_model):
    assert isinstance(harness_model(table_model), LM)
