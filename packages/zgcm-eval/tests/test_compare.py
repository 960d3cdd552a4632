import json
from dataclasses import replace

import numpy as np
import pytest

from zgcm_eval import HeldoutDocument, HeldoutOptions, HeldoutSet, evaluate_heldout
from zgcm_eval.compare import CompareOptions, compare_metrics, compare_reports
from zgcm_eval.metrics import Metric
from zgcm_eval.multiple_choice import AnsweredQuestion, ChoicesReport
from zgcm_eval.report import read_report, table, write_report

OPTIONS = CompareOptions(resamples=500)


def metric(values, weights=None, *, higher=False, name="m"):
    units = tuple(f"u{n}" for n in range(len(values)))
    return Metric(name, units, tuple(values), tuple(weights or [1.0] * len(values)), higher)


def test_a_ratio_is_the_ratio_of_the_sums():
    assert metric([1.0, 9.0], [1.0, 3.0]).value == 2.5
    with pytest.raises(ValueError, match="give one of each"):
        Metric("m", ("a",), (1.0, 2.0), (1.0,), False)
    with pytest.raises(ValueError, match="has a unit twice"):
        Metric("m", ("a", "a"), (1.0, 2.0), (1.0, 1.0), False)


def test_pairing_finds_a_small_gain_under_a_large_spread():
    rng = np.random.default_rng(0)
    hard = rng.uniform(1, 100, 200)
    result = compare_metrics(metric(hard), metric(hard - 0.1 + rng.normal(0, 0.05, 200)), OPTIONS)
    assert result.verdict == "better"
    assert result.low < result.difference < result.high < 0
    assert result.improved > 0.9
    assert result.high - result.low < 0.05


def test_noise_is_no_clear_difference_and_the_interval_covers_zero_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        one, two = rng.normal(0, 1, (2, 60)) + 5
        covered += compare_metrics(metric(one), metric(two), OPTIONS).verdict == "no clear difference"
    assert 180 <= covered <= 199


def test_the_confidence_holds_for_all_figures_together():
    rng = np.random.default_rng(5)
    one, two = rng.normal(0, 1, (2, 60)) + 5
    alone = compare_metrics(metric(one), metric(two), OPTIONS)
    among_ten = compare_metrics(metric(one), metric(two), OPTIONS, 10)
    assert among_ten.low < alone.low < alone.difference < alone.high < among_ten.high


def test_higher_is_better_turns_the_verdict_round():
    low, high = metric([0.0] * 20, higher=True), metric([1.0] * 20, higher=True)
    assert compare_metrics(low, high, OPTIONS).verdict == "better"
    assert compare_metrics(high, low, OPTIONS).verdict == "worse"
    assert compare_metrics(low, low, OPTIONS).improved == 0.5


def test_too_few_units_decide_nothing():
    assert compare_metrics(metric([2.0] * 9), metric([1.0] * 9), OPTIONS).verdict == "too few units"


def test_a_unit_without_weight_is_left_out():
    values, weights = [1.0] * 12 + [0.0], [1.0] * 12 + [0.0]
    result = compare_metrics(metric(values, weights), metric(values, weights), OPTIONS)
    assert (result.units, result.difference) == (12, 0.0)


@pytest.fixture
def two_models(table_model_class):
    return table_model_class(seed=0), table_model_class(seed=1)


@pytest.fixture
def sets():
    return [
        HeldoutSet(name, tuple(HeldoutDocument(f"{n}", f"{name} {n} " * (1 + n % 3)) for n in range(30)))
        for name in ("code", "prose")
    ]


def test_a_checkpoint_that_wins_one_domain_and_loses_another_is_mixed(two_models, sets):
    first, second = (evaluate_heldout(model, sets) for model in two_models)

    def shifted(report, by):
        domains = tuple(
            replace(d, documents=tuple(replace(s, nats=s.nats + by[d.name]) for s in d.documents))
            for d in report.domains
        )
        return replace(report, domains=domains)

    mixed = compare_reports(first, shifted(first, {"code": -1.0, "prose": 1.0}), OPTIONS)
    assert mixed.verdict == "mixed"
    verdicts = {m.name: m.verdict for m in mixed.metrics}
    assert (verdicts["code: bits per byte"], verdicts["prose: bits per byte"]) == ("better", "worse")
    assert compare_reports(first, shifted(first, {"code": -1.0, "prose": 0.0}), OPTIONS).verdict == "better"
    assert compare_reports(first, shifted(first, {"code": 1.0, "prose": 1.0}), OPTIONS).verdict == "worse"
    assert compare_reports(first, first, OPTIONS).verdict == "no clear difference"
    result = compare_reports(first, second, OPTIONS)
    assert [m.name for m in result.metrics][-1] == "total: bits per byte"
    assert json.loads(json.dumps(result.as_dict()))["metrics"] == result.rows()
    assert compare_reports(first, second, OPTIONS) == result


def test_reports_of_other_sets_or_other_windows_are_refused(two_models, sets):
    first = evaluate_heldout(two_models[0], sets)
    with pytest.raises(ValueError, match=r"digest is .* measure both alike"):
        compare_reports(first, evaluate_heldout(two_models[1], sets[:1]))
    with pytest.raises(ValueError, match="context is 64 in the first report and 32 in the second"):
        compare_reports(first, evaluate_heldout(two_models[1], sets, HeldoutOptions(context=32)))
    question = AnsweredQuestion("q", 0, (-1.0, -2.0), (1, 1), 0)
    with pytest.raises(ValueError, match="HeldoutReport and ChoicesReport measure different things"):
        compare_reports(first, ChoicesReport("t", "d", 0, (question,)))
    with pytest.raises(ValueError, match="not figures of the same units"):
        compare_metrics(metric([1.0]), metric([1.0], name="other"), OPTIONS)


@pytest.mark.parametrize("options", [{"confidence": 1.0}, {"confidence": 0.0}, {"resamples": 99}])
def test_useless_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CompareOptions(**options)


def test_reports_are_written_whole_and_read_by_their_format(tmp_path, two_models, sets):
    report = evaluate_heldout(two_models[0], sets)
    path = tmp_path / "deep" / "report.json"
    write_report(path, report)
    assert read_report(path) == report
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]
    path.write_text("[]")
    with pytest.raises(ValueError, match="is no report of zgcm-eval"):
        read_report(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_report(path)
    with pytest.raises(FileNotFoundError, match="none is missing"):
        read_report(tmp_path / "none")


def test_a_table_aligns_numbers_at_the_right():
    rows = [
        {"domain": "code", "tokens": 12345, "loss": 1.5, "perplexity": None, "sha256": "ab"},
        {"domain": "long name", "tokens": 7, "loss": 2e9, "perplexity": 3.25, "sha256": "cd"},
    ]
    assert table(rows).split("\n") == [
        "domain     tokens    loss  perplexity",
        "---------  ------  ------  ----------",
        "code       12,345  1.5000           -",
        "long name       7   2e+09      3.2500",
    ]
    assert table([]) == ""
