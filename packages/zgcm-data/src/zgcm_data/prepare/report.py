"""The data report: the funnel, what each rule removed, duplicates, complexity, shares and lengths."""

from typing import Any

from zgcm_data.prepare.figures import (
    complexity_histogram,
    length_histogram,
    matches,
    rule_examples,
    shares_along,
)
from zgcm_data.prepare.page import folded, histogram, note, page, stacked, table
from zgcm_data.prepare.steps import Steps, write_bytes

NAME = "data_report.html"
Results = dict[str, dict[str, Any]]


def write_report(steps: Steps, done: Results, recipe: dict[str, Any]) -> dict[str, Any]:
    """Write ``data_report.html``.

    Args:
        steps: The step runner.
        done: Results of all earlier steps.
        recipe: The complete recipe, as data.

    Returns:
        The size of the page.
    """
    target = steps.out / NAME

    def work(tell: Any) -> dict[str, Any]:
        sections = [
            ("Funnel", funnel(done)),
            ("What cleaning lowered", reasons(steps, done)),
            ("Duplicates and matches", removals(steps, done)),
            *([("Lexical complexity", complexity(steps, done))] if "score" in done else []),
            ("Shares along the order", along(steps, done)),
            ("Lengths", lengths(steps)),
            ("Sources", sources(done)),
            ("Recipe and digests", folded("Recipe", recipe) + table(digests(done))),
        ]
        rows = sum(done[f"pack-{name}"]["rows"] for name in stages(done))
        lead = f"{done['read']['documents']:,} documents in, {rows:,} rows out."
        data = page("Data report", lead, sections).encode("utf-8", "replace")
        write_bytes(target, data)
        return {"bytes": len(data)}

    return steps.run("report", {"unigram": done["unigram"]["key"], "recipe": recipe}, [target], work)


def funnel(done: Results) -> str:
    """Return the number of documents after each step."""
    decisions = {"keep": 0, "review": 0, "drop": 0}
    for row in done["clean"]["decisions"]:
        decisions[row["decision"]] += row["documents"]
    held = sum(item["documents"] for item in done["heldout"]["domains"])
    lines = [
        ("read", done["read"]["documents"], f"{sum(done['read']['skipped'].values()):,} faulty ones skipped"),
        (
            "kept by cleaning",
            decisions["keep"],
            f"{decisions['review']:,} to review, {decisions['drop']:,} dropped",
        ),
        (
            "after deduplication",
            done["dedup"]["kept"],
            f"{done['dedup']['exact']:,} exact, {done['dedup']['near']:,} near",
        ),
        *earlier(done),
        ("held out", held, f"{done['heldout']['excluded_near']:,} near them left training"),
        (
            "left for training",
            done["heldout"]["pool"],
            f"{done['decontaminate']['documents']:,} contaminated left",
        ),
    ]
    rows = [{"step": name, "documents": count, "besides": text} for name, count, text in lines]
    for name in stages(done):
        stage = done[f"order-{name}"]
        text = f"{stage['rows']:,} rows"
        if stage["uses"] != stage["documents"]:
            text += f", {stage['uses']:,} uses of a document or a part of one"
        rows.append({"step": f"stage {name}", "documents": stage["documents"], "besides": text})
    return table(rows)


def earlier(done: Results) -> list[tuple[str, int, str]]:
    """Return what is left after the exclusion of earlier builds, where there are some."""
    if "earlier" not in done:
        return []
    gone = done["earlier"]["documents"]
    left = done["dedup"]["kept"] - done["decontaminate"]["documents"] - sum(gone.values())
    besides = ", ".join(f"{count:,} {kind}" for kind, count in sorted(gone.items())) or "none"
    return [("without earlier builds", left, besides)]


def stages(done: Results) -> list[str]:
    """Return the stages of a build as the names of their steps end."""
    return [name.removeprefix("order-") for name in done if name.startswith("order-")]


def reasons(steps: Steps, done: Results) -> str:
    """Return counts and examples of each reason."""
    counts = [{"reason": name, "documents": number} for name, number in done["clean"]["reasons"].items()]
    return table(counts) + (table(rule_examples(steps.work / "clean")) if counts else "")


def removals(steps: Steps, done: Results) -> str:
    """Return what left because something else holds it, with the match of each."""
    parts = []
    for name, text in (
        ("duplicates", "Within the corpus; the match is the one that stayed."),
        ("excluded", "Training documents that nearly hold a held-out document."),
        ("cross_stage", "Candidates of stage 2 that stage 1 holds or nearly holds; stage 1 is untouched."),
        ("earlier", "Documents that an earlier build trains on or holds out; named after its folder."),
        ("contaminated", "Documents that share passages with evaluation texts."),
    ):
        if name == "cross_stage" and "order-2" not in done:  # mid-training uses each document once
            continue
        if name == "earlier" and name not in done:
            continue
        found = matches(steps.work / name)
        counts = ", ".join(f"{count:,} {kind}" for kind, count in found["kinds"].items()) or "none"
        parts.append(note(f"{text} {counts}.") + (table(found["examples"]) if found["examples"] else ""))
    return "".join(parts)


def complexity(steps: Steps, done: Results) -> str:
    """Return the histogram of complexity and the cut."""
    found, bounds = complexity_histogram(steps.work / "scores"), done["order-1"]["bounds"]
    text = f"Stage 1 takes general text from {bounds['low']:.3f} to {bounds['high']:.3f}; "
    text += f"{done['order-1']['outliers']:,} documents outside are left out of it."
    labels = (f"{found['low']:.2f} (easy)", f"{found['high']:.2f} (hard)")
    return histogram(found["counts"], labels, "documents") + note(text)


def along(steps: Steps, done: Results) -> str:
    """Return the shares of categories along every stage."""
    folders = {name: f"stage{name}" if name in ("1", "2") else name for name in stages(done)}
    text = "".join(
        stacked(shares_along(steps.work / folder), (f"start of stage {name}", f"end of stage {name}"))
        for name, folder in folders.items()
    )
    missed = done.get("order-1", {}).get("share_error", {})
    if not missed:
        return text
    named = ", ".join(f"{name.replace('_', ' ')} {tokens:,}" for name, tokens in missed.items())
    return text + note(
        f"Largest distance of any stretch of stage 1 from its share, in tokens: {named}. A document stays whole, so "
        "it is about as large as the longest document; max_document_tokens cuts longer ones."
    )


def lengths(steps: Steps) -> str:
    """Return the histogram of document lengths in tokens."""
    rows = length_histogram(steps.work / "tokens")
    for row in rows:
        bits = row.pop("bits")
        row["length"] = f"{2 ** (bits - 1) if bits else 0:,} to {2**bits - 1:,}"
    return table(
        [{"length": row["length"], "documents": row["documents"], "tokens": row["tokens"]} for row in rows]
    )


def sources(done: Results) -> str:
    """Return quota, share and epochs of every source in both stages."""
    names = ("category", "source", "tokens", "share", "available", "epochs")
    rows = [
        {"stage": stage, **{name: item[name] for name in names}}
        for stage in stages(done)
        for item in done[f"order-{stage}"]["sources"]
    ]
    return table(rows) + bands(done)


def bands(done: Results) -> str:
    """Return the tokens of each length band in the stages of mid-training."""
    rows = [
        {"stage": stage, **band} for stage in stages(done) for band in done[f"order-{stage}"].get("bands", [])
    ]
    return table(rows) if rows else ""


def digests(done: Results) -> list[dict[str, str]]:
    """Return the digests as rows."""
    return [
        *({"of": f"stage {name}", "sha256": done[f"pack-{name}"]["digest"]} for name in stages(done)),
        {"of": "tokenizer", "sha256": done["tokenizer"]["sha256"]},
        {"of": "held-out sets", "sha256": done["heldout"]["digest"]},
    ]
