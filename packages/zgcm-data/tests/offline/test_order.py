import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from zgcm_data import engine
from zgcm_data.complexity import PARTS, Scale, frequency_table, measure, words_frame
from zgcm_data.curriculum import choose, curriculum_order, describe, shuffle_order, without_outliers
from zgcm_data.mixture import capacity, largest_remainder, source_quotas
from zgcm_data.records import CorpusError

Rows = list[dict[str, Any]]


def pool(seed: int = 1, count: int = 400) -> Any:
    random_ = random.Random(seed)
    names = [("code", "c"), ("general_text", "g"), ("general_text", "h"), ("math", "m")]
    rows: dict[str, list[Any]] = {"id": [], "document": [], "category": [], "source": [], "tokens": []}
    for number in range(count):
        category, source = names[number % 4]
        rows["id"].append(f"{source}{number:04d}")
        rows["document"].append(f"{source}{number:04d}")
        rows["category"].append(category)
        rows["source"].append(source)
        rows["tokens"].append(random_.randint(2, 120))
    return engine.daft().from_pydict(rows)


def scores(frame: Any) -> Any:
    ids = [name for name in frame.to_pydict()["id"] if name[0] in "gh"]
    random_ = random.Random(4)
    return engine.daft().from_pydict({"id": ids, "score": [random_.gauss(0, 1) for _ in ids]})


def available(frame: Any) -> dict[tuple[str, str], int]:
    result: dict[tuple[str, str], int] = {}
    for row in engine.rows(frame):
        key = (row["category"], row["source"])
        result[key] = result.get(key, 0) + row["tokens"] + 1
    return result


def test_the_frequency_table_is_the_same_in_one_part_or_in_many(tmp_path: Path) -> None:
    random_ = random.Random(2)
    texts = [
        " ".join(random_.choices(["ab", "cde", "Cde", "fgh", "数据", "x"], k=random_.randint(0, 90)))
        for _ in range(70)
    ]
    frame = words_frame(engine.daft().from_pydict({"id": [str(n) for n in range(len(texts))], "text": texts}))
    expected = Counter(word for text in texts for word in text.lower().replace("数据", "数 据").split())
    for most in (10**6, 3, 1):
        assert frequency_table(frame, tmp_path / "scratch", most=most) == expected
    assert not list(tmp_path.iterdir())
    assert frequency_table(frame.where(engine.daft().lit(False)), tmp_path / "scratch") == {}


def test_largest_remainder_sums_exactly_and_breaks_ties_by_name() -> None:
    assert largest_remainder(10, {"b": 1, "a": 1, "c": 1}) == {"a": 4, "b": 3, "c": 3}
    for total in range(200):
        parts = largest_remainder(total, {"x": 0.7, "y": 0.2, "z": 0.1})
        assert sum(parts.values()) == total
        assert all(
            abs(parts[name] - total * share) < 1 for name, share in {"x": 0.7, "y": 0.2, "z": 0.1}.items()
        )


def test_quotas_sum_to_the_budget_and_follow_shares() -> None:
    held = {("code", "c"): 500, ("math", "m"): 100, ("general_text", "g"): 300, ("general_text", "h"): 100}
    quotas = source_quotas(400, held, {"code": 2, "general_text": 1, "math": 1}, {})
    assert quotas == {
        ("code", "c"): 200,
        ("general_text", "g"): 75,
        ("general_text", "h"): 25,
        ("math", "m"): 100,
    }
    with pytest.raises(
        CorpusError, match=r"quota of 101 tokens for math .* 100 tokens .* max_epochs.math = 2"
    ):
        source_quotas(404, held, {"code": 2, "general_text": 1, "math": 1}, {})
    assert (
        source_quotas(404, held, {"code": 2, "general_text": 1, "math": 1}, {"math": 2})["math", "m"] == 101
    )
    with pytest.raises(CorpusError, match=r"the 0 tokens that are left of it, used once; leave it out"):
        source_quotas(10, held, {"latex": 1}, {})


def test_capacity_is_a_total_that_can_be_split() -> None:
    held = {("code", "c"): 500, ("math", "m"): 100, ("general_text", "g"): 300}
    for shares in ({}, {"code": 0.3, "math": 0.31}, {"general_text": 1.0, "math": 3.0}):
        total = capacity(held, shares, {"math": 2})
        assert total > 190
        assert sum(source_quotas(total, held, shares, {"math": 2}).values()) == total
    assert capacity(held, {"latex": 1.0}, {}) == 0


def test_d20_extreme_weights_are_met_exactly_or_refused() -> None:
    frame = engine.daft().from_pydict(
        {
            "id": [f"{source}{number}" for source in "ab" for number in range(10)],
            "document": [f"{source}{number}" for source in "ab" for number in range(10)],
            "category": ["code"] * 10 + ["math"] * 10,
            "source": ["a"] * 10 + ["b"] * 10,
            "tokens": [9] * 20,
        }
    )
    quotas = source_quotas(99, available(frame), {"code": 0.02, "math": 0.98}, {})
    assert quotas == {("code", "a"): 2, ("math", "b"): 97}
    rows = engine.rows(choose(frame, quotas, "seed", {}))
    assert sum(row["take"] for row in rows if row["source"] == "a") == 2
    assert sum(row["take"] for row in rows if row["source"] == "b") == 97
    with pytest.raises(CorpusError, match=r"max_epochs.math = 2"):
        source_quotas(120, available(frame), {"code": 0.001, "math": 0.999}, {})


@pytest.mark.parametrize("total", [101, 1000, 4001, 9999])
def test_chosen_documents_meet_every_quota_exactly_and_hold_a_token_each(total: int) -> None:
    frame = pool()
    quotas = source_quotas(total, available(frame), {}, {})
    rows = engine.rows(choose(frame, quotas, "seed", {}))
    for key, quota in quotas.items():
        assert sum(row["take"] for row in rows if (row["category"], row["source"]) == key) == quota
    assert all(2 <= row["take"] <= row["tokens"] + 1 for row in rows)


def test_rest_of_one_token_is_shared_with_the_document_before() -> None:
    frame = engine.daft().from_pydict(
        {
            "id": ["a", "b", "c"],
            "document": ["a", "b", "c"],
            "category": ["code"] * 3,
            "source": ["s"] * 3,
            "tokens": [9, 9, 9],
        }
    )
    rows = engine.rows(choose(frame, {("code", "s"): 11}, "seed", {}))
    assert sorted(row["take"] for row in rows) == [2, 9]


def test_epochs_are_used_up_one_after_another() -> None:
    frame = engine.daft().from_pydict(
        {
            "id": ["a", "b", "c"],
            "document": ["a", "b", "c"],
            "category": ["math"] * 3,
            "source": ["s"] * 3,
            "tokens": [9, 9, 9],
        }
    )
    rows = engine.rows(choose(frame, {("math", "s"): 75}, "seed", {"math": 3}))
    by_epoch = [sum(row["take"] for row in rows if row["epoch"] == epoch) for epoch in range(3)]
    assert by_epoch == [30, 30, 15]


def ordered(total: int = 20001) -> tuple[Rows, dict[str, float]]:
    frame = pool(count=600)
    quotas = source_quotas(total, available(frame), {}, {})
    score = scores(frame)
    rows = engine.rows(curriculum_order(choose(frame, quotas, "seed", {}), score, "order"))
    return rows, {row["id"]: row["score"] for row in engine.rows(score)}


def test_general_text_ascends_in_complexity_and_positions_are_complete() -> None:
    rows, score = ordered()
    assert [row["position"] for row in rows] == list(range(len(rows)))
    values = [score[row["id"]] for row in rows if row["stream"] == "natural_language"]
    assert values == sorted(values)
    assert len(values) > 100


def test_every_stretch_holds_each_streams_share_to_within_its_longest_document() -> None:
    rows, _ = ordered()
    total = sum(row["take"] for row in rows)
    streams = {row["stream"] for row in rows}
    assert streams == {"natural_language", "code", "math"}
    longest = max(row["take"] for row in rows)
    share = {name: sum(row["take"] for row in rows if row["stream"] == name) / total for name in streams}
    seen, done = dict.fromkeys(streams, 0), 0
    for row in rows:
        seen[row["stream"]] += row["take"]
        done += row["take"]
        for name in streams:
            assert abs(seen[name] - share[name] * done) <= longest


def test_order_of_code_has_nothing_to_do_with_its_score() -> None:
    frame = pool(count=600)
    quotas = source_quotas(20001, available(frame), {}, {})
    chosen = choose(frame, quotas, "seed", {})
    every = frame.select("id").to_pydict()["id"]
    other = engine.daft().from_pydict({"id": every, "score": [float(hash(name) % 97) for name in every]})
    orders = [engine.rows(curriculum_order(chosen, score, "order")) for score in (scores(frame), other)]
    codes = [[row["id"] for row in rows if row["stream"] == "code"] for rows in orders]
    assert codes[0] == codes[1]


def test_outliers_outside_the_quantiles_leave_and_unscored_documents_too() -> None:
    values: list[float | None] = [float(number) for number in range(100)]
    frame = engine.daft().from_pydict(
        {"id": [str(number) for number in range(101)], "score": [*values, None]}
    )
    inside, bounds = without_outliers(frame, 0.05, 0.95)
    left = sorted(row["score"] for row in engine.rows(inside))
    assert left == [float(number) for number in range(5, 95)]
    assert bounds == {"low": 5.0, "high": 94.0}


def test_d24_shuffle_is_the_same_for_a_seed_and_another_for_another() -> None:
    frame = pool()
    chosen = choose(frame, source_quotas(9999, available(frame), {}, {}), "seed", {})
    again = choose(frame.sort("id", desc=True), source_quotas(9999, available(frame), {}, {}), "seed", {})
    one, two, three = (
        [row["id"] for row in engine.rows(shuffle_order(item, seed))]
        for item, seed in ((chosen, 20260603), (again, 20260603), (chosen, 1))
    )
    assert one == two
    assert sorted(one) == sorted(three)
    assert one != three


def test_table_of_the_stages_is_printed_from_one_place() -> None:
    assert [row["kind"] for row in describe()] == ["curriculum", "shuffle"]


COUNTS = {"the": 1000, "cat": 100, "sat": 100, "perspicacious": 1, "quotidian": 1}


def score(text: str, sentences: int = 1) -> float:
    parts = measure(text.split(), sentences, COUNTS, 1202, 5)
    scale = Scale(1202, 5, dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 1.0))
    result = scale.score(parts)
    assert result is not None
    return result


def test_complexity_grows_with_rarity_word_length_sentence_length_and_diversity() -> None:
    easy = "the cat sat " * 40
    assert score(easy) < score(easy.replace("cat", "quotidian", 10)) < score(easy.replace("cat", "quotidian"))
    assert score(easy) < score(easy.replace("cat", "catt"))
    assert score(easy, 40) < score(easy, 10) < score(easy, 1)
    varied = " ".join(f"{'abcdefghij'[i % 10]}{'klmnopqrst'[i // 10]}t" for i in range(100))
    dull = "akt blt " * 50
    diversity = [measure(text.split(), 1, COUNTS, 1202, 5)["diversity"] for text in (dull, varied)]
    assert diversity == [0.04, 1.0]


def test_complexity_does_not_depend_on_length() -> None:
    sentence = "the cat sat the quotidian cat sat the cat sat "
    assert score(sentence * 10, 10) == pytest.approx(score(sentence * 100, 100), abs=1e-12)


def test_a_document_without_words_has_no_score_and_a_short_one_the_median_diversity() -> None:
    assert measure([], 0, COUNTS, 1202, 5) == dict.fromkeys(PARTS)
    assert measure(["the"] * 49, 1, COUNTS, 1202, 5)["diversity"] is None
