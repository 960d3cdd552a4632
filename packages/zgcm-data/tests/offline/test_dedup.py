import itertools
import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from zgcm_data import engine
from zgcm_data.clean import content_key, normalize
from zgcm_data.dedup import connected_components, decide_duplicates, exclude, signature_frame
from zgcm_data.dedup.contamination import contaminated, passage_index
from zgcm_data.dedup.signatures import band_keys
from zgcm_data.recipe import DedupRecipe

RECIPE = DedupRecipe()


def frame(
    texts: dict[str, str], decisions: dict[str, str] | None = None, category: str = "general_text"
) -> Any:
    plain = [normalize(text, category) for text in texts.values()]
    return engine.daft().from_pydict(
        {
            "id": list(texts),
            "text": plain,
            "content_key": [content_key(text, category) for text in plain],
            "bytes": [len(text.encode()) for text in plain],
            "decision": [(decisions or {}).get(name, "keep") for name in texts],
        }
    )


def decide(texts: dict[str, str], **more: Any) -> dict[str, tuple[str, str]]:
    signatures = signature_frame(frame(texts, **more), RECIPE).collect()
    rows = engine.rows(decide_duplicates(signatures, RECIPE))
    return {row["id"]: (row["kind"], row["match"]) for row in rows}


def kept(texts: dict[str, str], **more: Any) -> set[str]:
    return {name for name, (kind, _) in decide(texts, **more).items() if not kind}


def words(seed: int, count: int) -> list[str]:
    random_ = random.Random(seed)
    return ["".join(random_.choices("abcdefghijklmnop", k=6)) for _ in range(count)]


def chain() -> dict[str, str]:
    """A~B and B~C nearly equal, A and C further apart than the threshold."""
    base = words(1, 300)
    other = words(2, 300)
    return {
        "a": " ".join(base),
        "b": " ".join(base[:264] + other[264:]),
        "c": " ".join(other[:36] + base[36:264] + other[264:]),
        "far": " ".join(words(3, 300)),
    }


def shingle_similarity(one: str, two: str) -> float:
    first, second = (set(zip(*(text.split()[i:] for i in range(5)), strict=False)) for text in (one, two))
    return len(first & second) / len(first | second)


def test_d3_kept_set_is_the_same_for_all_orders_of_a_chain() -> None:
    texts = chain()
    assert shingle_similarity(texts["a"], texts["b"]) > 0.7 > shingle_similarity(texts["a"], texts["c"])
    assert shingle_similarity(texts["b"], texts["c"]) > 0.7
    results = {frozenset(kept(dict(order))) for order in itertools.permutations(texts.items())}
    assert len(results) == 1
    survivors = next(iter(results))
    assert "far" in survivors
    assert len(survivors) == 2


@pytest.mark.slow
def test_d3_kept_set_does_not_depend_on_workers_or_hash_seed() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_dedup\n"
        "print(sorted(test_dedup.kept(test_dedup.chain() | test_dedup.copies())))\n"
    )
    results = set()
    for cores, seed in (("0", "1"), ("0,1", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        pin = f"import os; os.sched_setaffinity(0, [{cores}])\n" if hasattr(os, "sched_setaffinity") else ""
        command = [sys.executable, "-c", pin + script, os.path.dirname(__file__)]
        results.add(
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        )
    assert len(results) == 1


def copies() -> dict[str, str]:
    text = " ".join(words(9, 120))
    return {f"copy-{number}": text for number in range(5)}


def test_d4_of_five_copies_exactly_one_is_left_and_every_removal_names_it() -> None:
    result = decide(copies())
    assert [name for name, (kind, _) in result.items() if not kind] == ["copy-0"]
    assert {match for kind, match in result.values() if kind} == {"copy-0"}


def test_exact_copy_of_a_removed_near_duplicate_names_the_survivor() -> None:
    base = words(1, 300)
    long, short = " ".join([*base, "more", "words"]), " ".join(base)
    result = decide({"long": long, "short": short, "twin": short})
    assert result == {"long": ("", ""), "short": ("near", "long"), "twin": ("exact", "long")}


def test_survivor_is_kept_before_review_then_longest_then_smallest_id() -> None:
    base = " ".join(words(4, 200))
    near = base + " and more"
    assert kept({"a": near, "b": base}, decisions={"a": "review"}) == {"b"}
    assert kept({"b": base, "a": near}) == {"a"}
    assert kept({"b": base, "a": base.upper()}) == {"a"}


def test_chinese_near_duplicates_are_found_and_different_texts_are_not() -> None:
    random_ = random.Random(3)
    characters = [chr(0x4E00 + number) for number in range(3000)]
    one = "".join(random_.choices(characters, k=400))
    near = one[:200] + "改" + one[200:]
    other = "".join(random_.choices(characters, k=400))
    assert kept({"one": one, "near": near, "other": other}) == {"near", "other"}


def test_short_documents_never_collapse_together() -> None:
    texts = {f"s{number}": f"Returns the value {number}." for number in range(30)}
    texts |= {"empty-ish": "!!! ??? ...", "marks": "--- +++ ==="}
    assert kept(texts) == set(texts)


def test_code_that_differs_in_indentation_only_is_not_an_exact_copy() -> None:
    one, two = "if a:\n    b()\nc()\n", "if a:\n    b()\n    c()\n"
    assert kept({"one": one, "two": two}, category="code") == {"one", "two"}


def test_components_are_the_smallest_ids_of_long_chains() -> None:
    count = 60
    names = [f"n{number:03d}" for number in range(count)]
    random.Random(1).shuffle(names)
    pairs = engine.daft().from_pydict({"id": names[1:], "match": names[:-1]})
    result = engine.rows(connected_components(pairs))
    assert {row["cluster"] for row in result} == {"n000"}
    assert len(result) == count


def test_band_keys_depend_on_every_value_and_on_the_position_of_the_band() -> None:
    signature = np.arange(16, dtype=np.uint32).reshape(1, 16)
    base = band_keys(signature, 8)
    for position in range(16):
        changed = signature.copy()
        changed[0, position] += 1
        assert (band_keys(changed, 8) != base).tolist()[0] == [position < 8, position >= 8]
    same = np.tile(np.arange(8, dtype=np.uint32), 2).reshape(1, 16)
    assert len(set(band_keys(same, 8)[0].tolist())) == 2


def test_exclude_finds_exact_and_near_matches_and_names_them() -> None:
    base = words(1, 200)
    reference = {"held": " ".join(base), "tale": " ".join(words(5, 200))}
    candidates = {
        "same": " ".join(base).upper(),
        "half": " ".join(base[:165] + words(6, 40)),
        "free": " ".join(words(7, 200)),
    }
    signatures = [signature_frame(frame(texts), RECIPE).collect() for texts in (candidates, reference)]
    found = {row["id"]: row for row in engine.rows(exclude(*signatures, RECIPE))}
    assert {name: (row["kind"], row["match"]) for name, row in found.items()} == {
        "same": ("exact", "held"),
        "half": ("near", "held"),
    }
    assert 0.5 <= found["half"]["similarity"] < 0.9


def test_passages_are_matched_by_words_and_by_characters_where_there_are_no_spaces() -> None:
    chinese = "今天的天气非常好我们一起去公园散步看花"
    index = passage_index({"zh": chinese, "five": "one two three four five", "no": "one two"}, 13)
    assert index.too_short == 1
    frame_ = engine.daft().from_pydict(
        {
            "id": ["a", "b", "c", "d"],
            "text": [
                f"前面{chinese}后面",
                chinese[:12],
                "zero, One -- two three, FOUR five six",
                "two three four five",
            ],
        }
    )
    found = {row["id"]: (row["match"], row["shared"]) for row in engine.rows(contaminated(frame_, index, 1))}
    assert found == {"a": ("zh", len(chinese) - 12), "c": ("five", 1)}
