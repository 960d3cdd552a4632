"""The charts of a report, as SVG in a wide and a narrow form, and the loss as PNG.

matplotlib draws into memory with its Agg and SVG backends; nothing is shown and no global state is changed.
"""

import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zgcm_train.files import write_atomic

COLOURS = ("#2563a8", "#c4542d", "#3b8452", "#8659a6", "#a8832a", "#4f6b75")
WIDE, NARROW = (8.6, 3.3), (4.2, 3.5)
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "zgcm",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a929b",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ec",
    "legend.frameon": False,
}
Draw = Callable[[Axes], None]


@dataclass(frozen=True)
class Chart:
    """One chart in two widths.

    Attributes:
        title: what it shows, also the text for those who cannot see it.
        wide: SVG for broad screens.
        narrow: SVG for phones.
    """

    title: str
    wide: str
    narrow: str


def render(title: str, draw: Draw, bars: int = 0) -> Chart:
    """Draw one chart in both widths; ``bars`` lying bars get the height that they need."""
    wide, narrow = (size if not bars else (size[0], 0.9 + 0.27 * bars) for size in (WIDE, NARROW))
    return Chart(title, _svg(draw, wide), _svg(draw, narrow))


def loss_chart(train: Sequence[dict[str, Any]]) -> Draw:
    """Return a drawing of the training loss of every stage, the switches marked."""

    def draw(axes: Axes) -> None:
        for index, stage in enumerate(stages_of(train)):
            points = [r for r in train if r["stage"] == stage]
            axes.plot(
                _millions(points), [r["loss"] for r in points], color=_colour(index), label=stage, lw=1.6
            )
        _mark_switches(axes, train)
        axes.set(xlabel="tokens (millions)", ylabel="training loss (nats per token)")
        axes.legend(title="stage")

    return draw


def series_chart(train: Sequence[dict[str, Any]], key: str, label: str) -> Draw:
    """Return a drawing of one value of the metrics over tokens, from zero up."""

    def draw(axes: Axes) -> None:
        axes.plot(_millions(train), [r[key] for r in train], color=_colour(0), lw=1.6)
        _mark_switches(axes, train)
        axes.set(xlabel="tokens (millions)", ylabel=label)
        axes.set_ylim(bottom=0)

    return draw


def domain_chart(evaluations: Sequence[dict[str, Any]], baseline: dict[str, float]) -> Draw:
    """Return a drawing of bits per byte per domain, one bar per evaluation and the baseline as a line."""

    def draw(axes: Axes) -> None:
        domains = list(evaluations[0]["domains"])
        width = 0.8 / len(evaluations)
        for index, record in enumerate(evaluations):
            places = [d + (index - (len(evaluations) - 1) / 2) * width for d in range(len(domains))]
            heights = [record["domains"][name]["bits_per_byte"] for name in domains]
            axes.bar(places, heights, width * 0.92, color=_colour(index), label=record["label"])
        for place, name in enumerate(domains):
            if name in baseline:
                label = "unigram baseline" if place == 0 else "_"
                axes.hlines(
                    baseline[name], place - 0.45, place + 0.45, color="#20262c", ls="--", lw=1.4, label=label
                )
        axes.set_xticks(range(len(domains)), [name.replace("_", " ") for name in domains])
        axes.set_ylabel("bits per byte (lower is better)")
        axes.grid(axis="x", visible=False)
        axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return draw


def share_chart(rows: Sequence[dict[str, Any]]) -> Draw:
    """Return a drawing of nominal against observed share per source of one stage."""

    def draw(axes: Axes) -> None:
        labels = [row["source"] for row in rows]
        places = range(len(rows))
        axes.barh(
            [p - 0.2 for p in places],
            [row["nominal_share"] * 100 for row in rows],
            0.36,
            color="#c3ccd4",
            label="nominal",
        )
        axes.barh(
            [p + 0.2 for p in places],
            [row["observed_share"] * 100 for row in rows],
            0.36,
            color=_colour(0),
            label="observed",
        )
        axes.set_yticks(places, labels, fontsize=9)
        axes.invert_yaxis()
        axes.set_xlabel("share of the stage's tokens (%)")
        axes.grid(axis="y", visible=False)
        axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return draw


def stages_of(train: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the stages in their order."""
    return list(dict.fromkeys(record["stage"] for record in train))


def write_loss_picture(path: Path, train: Sequence[dict[str, Any]]) -> None:
    """Write the training loss as a PNG, 1,290 by 600 pixels."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 4.0), layout="constrained")
        axes = figure.subplots()
        loss_chart(train)(axes)
        axes.set_title("Training loss by stage", loc="left")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
    write_atomic(path, buffer.getvalue())


def _svg(draw: Draw, size: tuple[float, float]) -> str:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _mark_switches(axes: Axes, train: Sequence[dict[str, Any]]) -> None:
    for before, after in itertools.pairwise(train):
        if before["stage"] != after["stage"]:
            place = before["tokens"] / 1e6
            axes.axvline(place, color="#20262c", lw=1.0, ls=":")
            axes.annotate(
                "stage switch",
                (place, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(4, -2),
                textcoords="offset points",
                va="top",
                fontsize=8.5,
                color="#20262c",
            )


def _millions(records: Sequence[dict[str, Any]]) -> list[float]:
    return [record["tokens"] / 1e6 for record in records]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
