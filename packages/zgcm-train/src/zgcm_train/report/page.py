"""One self-contained HTML page: no script, no font and no picture from elsewhere."""

import html
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from zgcm_train.console import short_count, short_time
from zgcm_train.errors import explain_os_error
from zgcm_train.files import write_atomic
from zgcm_train.header import model_lines, precision_lines
from zgcm_train.report import charts
from zgcm_train.report.events import events, switches
from zgcm_train.report.parts import figure, section, table
from zgcm_train.report.records import RunRecords, read_records


def write_report(folder: Path) -> Path:
    """Write ``report.html`` and ``loss.png`` into a run folder.

    Args:
        folder: the run folder.

    Returns:
        The page.

    Raises:
        PathError: it is not a run folder, nothing was trained yet, or it cannot be written.
    """
    records = read_records(folder)
    try:
        charts.write_loss_picture(folder / "loss.png", records.train)
        page = folder / "report.html"
        write_atomic(page, render_page(records))
    except OSError as error:
        raise explain_os_error(error, "writing the report") from error
    return page


def render_page(records: RunRecords) -> str:
    """Return the page as HTML."""
    name = html.escape(records.recipe.run.name)
    style = (resources.files("zgcm_train.report") / "page.css").read_text(encoding="utf-8")
    body = "".join(
        [
            _summary(records),
            _loss(records),
            _domains(records),
            _ledger(records),
            events(records),
            _speed(records),
            _data(records),
            _settings(records),
        ]
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>ZGCM run {name}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{style}</style></head>\n<body><main><h1>Run {name}</h1>{body}</main></body></html>\n"
    )


def _summary(records: RunRecords) -> str:
    last, seconds = records.train[-1], sum(r["seconds"] for r in records.train)
    facts = [
        ("updates", f"{last['step']:,} of {records.recipe.total_updates:,}"),
        ("tokens", f"{last['tokens']:,}"),
        ("loss tokens", f"{last['loss_tokens']:,}"),
        ("updates left out", f"{last['skipped']}"),
        ("last training loss", f"{last['loss']:.4f} nats per token"),
        ("training time", short_time(seconds)),
        ("peak memory", f"{last['peak_memory_bytes'] / 2**30:.2f} GiB"),
    ]
    cards = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts)
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in model_lines(records.recipe))
    return f'<dl class="facts">{cards}</dl>{lines}'


def _loss(records: RunRecords) -> str:
    chart = charts.render("Training loss of both stages over tokens", charts.loss_chart(records.train))
    return section("Training loss", figure(chart), "Mean over the loss tokens of each log interval.")


def _domains(records: RunRecords) -> str:
    if not records.evaluations:
        return ""
    note = (
        "Held-out text that no stage was trained on. Bits per byte divide by the UTF-8 bytes of the raw text, so they "
        "compare across tokenizers. The unigram baseline knows only how often each token occurs in the training rows."
    )
    chart = charts.render(
        "Bits per byte per domain", charts.domain_chart(records.evaluations, records.baseline)
    )
    heads = [
        "domain",
        "bytes",
        "unigram baseline",
        *(f"{e['label']} (update {e['step']})" for e in records.evaluations),
        "loss at the last one (nats per token)",
    ]
    rows = [_domain_row(records, name) for name in records.evaluations[-1]["domains"]]
    return section("Held-out bits per byte", figure(chart) + table(heads, rows, text=1), note)


def _domain_row(records: RunRecords, name: str) -> list[str]:
    figures = [e["domains"][name] for e in records.evaluations]
    baseline = records.baseline.get(name)
    return [
        name.replace("_", " "),
        f"{figures[-1]['bytes']:,}",
        f"{baseline:.3f}" if baseline is not None else "not measured",
        *(f"{f['bits_per_byte']:.3f}" for f in figures),
        f"{figures[-1]['loss']:.3f}",
    ]


def _ledger(records: RunRecords) -> str:
    shares = "".join(_shares(records, stage) for stage in charts.stages_of(records.train))
    heads = [
        "stage",
        "source",
        "category",
        "nominal",
        "observed",
        "tokens",
        "loss tokens",
        "documents",
        "epochs",
    ]
    rows = [
        [
            s["stage"],
            s["source"],
            s["category"].replace("_", " "),
            f"{s['nominal_share']:.2%}",
            f"{s['observed_share']:.2%}",
            f"{s['tokens']:,}",
            f"{s['loss_tokens']:,}",
            f"{s['documents']:,}",
            f"{s['epochs']:.3g}",
        ]
        for s in records.sources
    ]
    note = "Nominal is the share that the data recipe asked for; observed is what the updates really read."
    return section("Token ledger", shares + table(heads, rows, text=3) + switches(records), note)


def _shares(records: RunRecords, stage: str) -> str:
    rows = [row for row in records.sources if row["stage"] == stage]
    chart = charts.render(
        f"Nominal and observed share of each source in stage {stage}", charts.share_chart(rows), len(rows)
    )
    return f"<h3>Stage {html.escape(stage)}</h3>{figure(chart)}"


def _speed(records: RunRecords) -> str:
    rate = charts.render(
        "Learning rate", charts.series_chart(records.train, "learning_rate", "learning rate")
    )
    speed = charts.render(
        "Throughput", charts.series_chart(records.train, "tokens_per_second", "tokens per second")
    )
    norm = charts.render("Gradient norm", charts.series_chart(records.train, "grad_norm", "gradient norm"))
    tokens, seconds = records.train[-1]["tokens"], sum(r["seconds"] for r in records.train)
    note = f"{short_count(tokens / max(seconds, 1e-9))} tokens per second on average, evaluation and saving left out."
    return (
        section("Learning rate", figure(rate))
        + section("Throughput", figure(speed), note)
        + section("Gradient norm", figure(norm), "Before clipping, at each log interval's last update.")
    )


def _data(records: RunRecords) -> str:
    funnel = records.build.get("funnel")
    if not funnel:
        return ""
    decisions = Counter[str]()
    for entry in funnel["clean"]["decisions"]:
        decisions[entry["decision"]] += entry["documents"]
    dedup, heldout = funnel["dedup"], funnel["heldout"]
    frozen = sum(domain["documents"] for domain in heldout["domains"])
    rows = [
        ["read", f"{funnel['read']['documents']:,}", f"{funnel['read']['bytes'] / 1e6:.1f} MB"],
        [
            "kept by cleaning",
            f"{decisions['keep']:,}",
            f"{decisions['review']:,} to review, {decisions['drop']:,} dropped",
        ],
        [
            "kept by deduplication",
            f"{dedup['kept']:,}",
            f"{dedup['exact']:,} exact and {dedup['near']:,} near duplicates left",
        ],
        ["held out", f"{frozen:,}", f"{heldout['excluded_near']:,} near duplicates of them left training"],
        ["for training", f"{funnel['tokenize']['documents']:,}", f"{funnel['tokenize']['tokens']:,} tokens"],
    ]
    return section(
        "Data, step by step", table(["step", "documents", "bytes, tokens and reasons"], rows, text=1)
    )


def _settings(records: RunRecords) -> str:
    environment = [[k, _plain(v)] for k, v in records.environment.items()]
    precision = "".join(f"<li>{html.escape(line)}</li>" for line in precision_lines(records.recipe))
    return (
        section("Precision", f"<ul>{precision}</ul>")
        + section("Environment", table(["item", "value"], environment, text=2))
        + section("Effective recipe", f"<pre>{html.escape(records.recipe_text)}</pre>")
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)
