import json
import re
import sys

import pytest

from zgcm_eval import __version__
from zgcm_eval.cli import main

COMMANDS = ["freeze", "heldout", "tasks", "long-context", "memorization", "compare", "report"]


@pytest.fixture
def model(table_model_class, monkeypatch, tmp_path):
    """The name of an importable table model."""
    (tmp_path / "models_of_a_user.py").write_text("factory = None\nnothing = lambda: 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import models_of_a_user

    models_of_a_user.first = lambda: table_model_class(max_length=1024, seed=0)
    models_of_a_user.second = lambda: table_model_class(max_length=1024, seed=1)
    yield "python:models_of_a_user:first"
    del sys.modules["models_of_a_user"]


@pytest.fixture
def frozen(tmp_path):
    lines = [{"id": f"d{n}", "domain": ("code", "prose")[n % 2], "text": f"text {n} " * 5} for n in range(30)]
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["freeze", str(path), "--out", str(tmp_path / "heldout")]) == 0
    return tmp_path / "heldout"


def test_measure_twice_compare_and_report(model, frozen, tmp_path, capsys):
    capsys.readouterr()
    first, second = str(tmp_path / "first.json"), str(tmp_path / "second.json")
    assert main(["heldout", model, "--sets", str(frozen), "--out", first]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.split("\n")[0].split() == [
        "domain", "documents", "tokens", "bytes", "loss", "perplexity", "bits", "per", "byte",
    ]  # fmt: skip
    assert main(["heldout", model.replace("first", "second"), "--sets", str(frozen), "--out", second]) == 0
    capsys.readouterr()
    assert main(["compare", first, second, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] in ("better", "worse", "mixed", "no clear difference")
    assert [m["name"] for m in result["metrics"]][-1] == "total: bits per byte"
    assert main(["compare", first, second]) == 0
    assert f"{second} is {result['verdict']}" in capsys.readouterr().out
    codes = {main(["compare", *pair, "--fail-if-worse"]) for pair in ((first, second), (second, first))}
    assert 6 in codes
    capsys.readouterr()
    assert main(["report", first, second]) == 0
    assert capsys.readouterr().out.count("total") == 2
    assert main(["report", first, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[first]["prefix_id"] == 256


def test_context_and_batch_reach_the_evaluation(model, frozen, capsys):
    capsys.readouterr()
    base = ["heldout", model, "--sets", str(frozen), "--json"]
    assert main([*base, "--context", "16", "--overlap", "3", "--tokens-per-batch", "64"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["context"], report["overlap"]) == (16, 3)


def test_memorization_takes_ids_or_text(model, tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    lines = [{"id": "a", "token_ids": list(range(64))}, {"text": "x" * 64}, {"text": "short"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["memorization", model, "--samples", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["n"], report["too_short"], report["prefix_id"]) == (2, 1, 256)
    assert [sample["id"] for sample in report["samples"]] == ["a", "2"]
    path.write_text('{"id": "a"}\n')
    assert main(["memorization", model, "--samples", str(path)]) == 2
    assert "line 1 of the samples has neither token_ids nor text" in capsys.readouterr().err


def test_long_context_prints_a_row_per_cell(model, tmp_path, capsys):
    filler = tmp_path / "filler.jsonl"
    filler.write_text('{"text": "One sentence. Another one."}\n')
    options = ["--lengths", "300", "500", "--depths", "0", "1", "--samples", "1", "--filler", str(filler)]
    assert main(["long-context", model, *options]) == 0
    lines = capsys.readouterr().out.strip().split("\n")
    assert lines[0].split() == ["length", "depth", "n", "retrieved", "preferred"]
    assert len(lines) == 6


def test_a_changed_set_is_refused_with_code_3(model, frozen, capsys):
    path = frozen / "code.jsonl"
    path.write_text(path.read_text().replace("text 2", "text 3"))
    assert main(["heldout", model, "--sets", str(frozen)]) == 3
    error = capsys.readouterr().err
    assert error.startswith("zgcm-eval: ")
    assert "code.jsonl was changed after it was frozen" in error


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["heldout", "zgcm:nowhere", "--sets", "HELDOUT"], 3, "nowhere is missing"),
        (["heldout", "hf:nowhere", "--sets", "HELDOUT"], 3, "nowhere is missing"),
        (["heldout", "MODEL", "--sets", "nowhere"], 3, "manifest.json is missing"),
        (["heldout", "gguf:file", "--sets", "HELDOUT"], 2, "is not zgcm:DIR, hf:DIR or python:MODULE:NAME"),
        (["heldout", "python:no_such_module:f", "--sets", "HELDOUT"], 1, "no_such_module"),
        (["heldout", "python:models_of_a_user:factory", "--sets", "HELDOUT"], 2, "has no function 'factory'"),
        (["heldout", "python:models_of_a_user:nothing", "--sets", "HELDOUT"], 2, "returned int"),
        (["heldout", "MODEL", "--sets", "HELDOUT", "--context", "0"], 2, "context is 0"),
        (["compare", "a.json", "b.json"], 3, "a.json is missing"),
        (["freeze", "none.jsonl", "--out", "HELDOUT"], 3, "none.jsonl is missing"),
        (["memorization", "MODEL", "--samples", "none.jsonl"], 3, "none.jsonl is missing"),
    ],
)
def test_bad_input_gets_one_sentence_and_its_code(model, frozen, capsys, arguments, code, message):
    arguments = [a.replace("MODEL", model).replace("HELDOUT", str(frozen)) for a in arguments]
    capsys.readouterr()
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_lines_that_are_no_documents_are_named(tmp_path, capsys):
    path = tmp_path / "documents.jsonl"
    for content, message in (
        ('{"domain": "a", "text": "x"}\n{"domain": "a"}\n', "line 2 of .* has no 'text' of type str"),
        ('{"domain": "a", "text": "x"}\n{oops\n', "line 2 of .* is not JSON"),
    ):
        path.write_text(content)
        assert main(["freeze", str(path), "--out", str(tmp_path / "set")]) == 2
        assert re.search(message, capsys.readouterr().err)
        assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_holds_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"example:\n  zgcm-eval {name} " in capsys.readouterr().out


def test_help_version_and_wrong_usage(capsys):
    for arguments, code in ((["--help"], 0), (["--version"], 0), ([], 2), (["heldout"], 2)):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == code
    shown = capsys.readouterr().out
    assert f"zgcm-eval {__version__}\n" in shown
    assert all(re.search(rf"\n +{name}\s+\w", shown) for name in COMMANDS)


def test_a_missing_extra_is_named(model, monkeypatch, capsys, tmp_path):
    for name in (
        "lm_eval",
        "lm_eval.api",
        "lm_eval.api.model",
        "lm_eval.tasks",
        "transformers",
        "zgcm_model",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["tasks", model, "--tasks", "hellaswag"]) == 1
    assert 'pip install "zgcm-eval[harness]"' in capsys.readouterr().err
    for kind, extra in (("hf", "huggingface"), ("zgcm", "zgcm")):
        assert main(["tasks", f"{kind}:{tmp_path}", "--tasks", "hellaswag"]) == 1
        assert f'pip install "zgcm-eval[{extra}]"' in capsys.readouterr().err
