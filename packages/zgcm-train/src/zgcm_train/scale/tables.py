"""Memory and traffic of ranks, for people."""

from collections.abc import Sequence
from dataclasses import fields

from rich.console import Console
from rich.table import Column, Table

from zgcm_train.scale.measure import MemoryUse, RankMeasure


def print_ranks(ranks: Sequence[RankMeasure], console: Console) -> None:
    """Print what was measured; nothing for no rank.

    Args:
        ranks: in the order of the columns.
        console: where to.
    """
    if not ranks:
        return
    console.print("Memory of one update, assembled here with tensors that have shapes only:")
    console.print(_memory_table(ranks))
    if any(rank.traffic for rank in ranks):
        console.print("GB that leave a rank in one update:")
        console.print(_traffic_table(ranks))


def _memory_table(ranks: Sequence[RankMeasure]) -> Table:
    unit, size = ("GiB", 2**30) if max(rank.memory.peak for rank in ranks) >= 2**30 else ("MiB", 2**20)
    table = Table(unit)
    for rank in ranks:
        table.add_column(f"rank {rank.rank}", justify="right")
    for field in fields(MemoryUse):
        if field.type is int:
            sizes = [f"{getattr(rank.memory, field.name) / size:,.3f}" for rank in ranks]
            table.add_row(field.name.replace("_", " "), *sizes)
    table.add_row("peak is in", *(rank.memory.peak_phase for rank in ranks))
    return table


def _traffic_table(ranks: Sequence[RankMeasure]) -> Table:
    """Return one block of rows for each combination of axes: so the table fits into 80 columns on any mesh."""
    table = Table("what, over which axes", *_right("times", *(f"rank {rank.rank}" for rank in ranks)))
    sums = {
        (t.axes, t.purpose, t.kind, number): t
        for number, rank in enumerate(ranks)
        for t in rank.traffic
        if t.kind != "receive"
    }
    rows = dict.fromkeys(key[:3] for key in sums)
    for axes in dict.fromkeys(row[0] for row in rows):
        table.add_section()
        table.add_row(f"over {axes}", style="bold")
        for row in (row for row in rows if row[0] == axes):
            found = [sums.get((*row, number)) for number in range(len(ranks))]
            times = sorted({t.count for t in found if t is not None})
            cells = ["" if t is None else f"{t.sent / 1e9:,.3f}" for t in found]
            table.add_row(f"  {row[1]}: {row[2]}", "-".join(f"{count:,}" for count in times), *cells)
    return table


def _right(*names: str) -> list[Column]:
    return [Column(name, justify="right", no_wrap=True) for name in names]
