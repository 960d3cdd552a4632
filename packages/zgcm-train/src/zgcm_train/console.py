"""What people see while a run goes on; everything goes to stderr."""

from typing import Any

from rich.console import Console

EVENTS = {
    "start": "at the start",
    "switch": "at the stage switch",
    "interval": "on the way",
    "end": "at the end",
}


def progress_console() -> Console:
    """Return the console for progress, apart from results."""
    return Console(stderr=True, highlight=False)


def train_line(record: dict[str, Any], total: int) -> str:
    """Return the line of one log interval.

    Args:
        record: from ``metrics.jsonl``, of kind ``train``.
        total: updates of the whole run.
    """
    return (
        f"step {record['step']:>{len(str(total))}}/{total}  {record['stage']}  loss {record['loss']:.4f}  "
        f"norm {record['grad_norm']:.3f}  lr {record['learning_rate']:.2e}  {short_count(record['tokens'])} tokens  "
        f"{short_count(record['tokens_per_second_per_device'])} tok/s/device  {record['model_tflops']:.3f} TFLOP/s "
        f"({record['model_tflops_if_all_full']:.3f} all-global)  "
        f"{record['peak_memory_bytes'] / 2**30:.1f} GiB  {short_time(record['seconds_left'])} left"
    )


def evaluation_line(record: dict[str, Any]) -> str:
    """Return the line of one held-out evaluation.

    Args:
        record: from ``metrics.jsonl``, of kind ``eval``.
    """
    domains = "  ".join(f"{name} {d['bits_per_byte']:.3f}" for name, d in record["domains"].items())
    return f"held-out bits per byte {EVENTS[record['event']]}: {domains}"


def short_count(number: float) -> str:
    """Return a number with a unit, such as 12.6M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"


def short_time(seconds: float) -> str:
    """Return a duration such as 3 min 20 s."""
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole / 86400:.1f} days"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
