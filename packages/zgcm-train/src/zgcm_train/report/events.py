"""What happened in a run besides learning: switches of stage, and what went wrong."""

import html
from typing import Any

from zgcm_train.report.parts import section, table
from zgcm_train.report.records import RunRecords

TITLES = {
    "loss_spike": "Loss spike",
    "not_finite": "Not finite",
    "save_failed": "Save failed",
    "fp8_saturation": "FP8 saturation",
    "hang": "Hang",
}


def events(records: RunRecords) -> str:
    """Return the list of what went wrong; empty for a run without events."""
    if not records.events:
        return ""
    items = "".join(f"<li>{html.escape(_sentence(event))}</li>" for event in records.events)
    return section("Events", f"<ul>{items}</ul>")


def _sentence(event: dict[str, Any]) -> str:
    place = f", update {event['step']:,}" if "step" in event else ""
    return f"{TITLES[event['event']]}{place}: {event['message']}"


def switches(records: RunRecords) -> str:
    """Return what changed at each switch of stage, with the held-out figures around it."""
    return "".join(_switch(event, records.after_switch.get(event["step"])) for event in records.switches)


def _switch(event: dict[str, Any], after: dict[str, Any] | None) -> str:
    facts = [
        [f"{event['ended']} to {event['stage']}", f"{event['step']:,}", f"{event['global_tokens']:,}"]
        + ["yes" if event[key] else "no" for key in ("learning_rate_changed", "length_changed")]
    ]
    heads = ["switch", "after update", "global tokens", "learning rate changed", "length changed"]
    shares = [
        [name, *_share(event["old"], name), *_share(event["new"], name), f"{epochs:.3g}"]
        for name, epochs in event["cumulative_epochs"].items()
    ]
    columns = [
        "source",
        "nominal before",
        "observed before",
        "nominal after",
        "in the new data",
        "epochs so far",
    ]
    title = f"<h3>From {html.escape(event['ended'])} to {html.escape(event['stage'])}</h3>"
    return title + table(heads, facts, text=1) + table(columns, shares, text=1) + _heldout(event, after)


def _share(sources: list[dict[str, Any]], name: str) -> list[str]:
    for source in sources:
        if source["name"] == name:
            return [f"{source['nominal_share']:.2%}", f"{source['observed_share']:.2%}"]
    return ["none", "none"]


def _heldout(event: dict[str, Any], after: dict[str, Any] | None) -> str:
    """Return the held-out figures before the switch, and those first measured after it."""
    before = event["heldout_before"]
    if not before:
        return ""
    rows = []
    for name, figures in before.items():
        later = after["heldout_after"].get(name) if after else None
        figure = f"{later['bits_per_byte']:.3f}" if later else "not measured"
        rows.append([name, f"{figures['bits_per_byte']:.3f}", figure])
    place = f"after, at update {after['measured_at']:,}" if after else "after"
    return table(["held-out bits per byte", "before", place], rows, text=1)
