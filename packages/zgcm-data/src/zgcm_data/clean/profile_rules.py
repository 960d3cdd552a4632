"""Rules that dataset profiles are made of.

Source: thresholds of the public release of the ZGCM-1 data pipeline, 0.1.0.
"""

import json
import re
import zlib
from pathlib import PurePosixPath

from zgcm_data.clean.rules import Rule, number
from zgcm_data.records import Record

SUFFIXES = frozenset(
    [
        ".c",
        ".cc",
        ".clj",
        ".cpp",
        ".cs",
        ".css",
        ".cu",
        ".dart",
        ".ex",
        ".go",
        ".h",
        ".hpp",
        ".hs",
        ".html",
        ".ipynb",
        ".java",
        ".jl",
        ".js",
        ".jsx",
        ".kt",
        ".lua",
        ".m",
        ".md",
        ".ml",
        ".php",
        ".pl",
        ".py",
        ".r",
        ".rb",
        ".rs",
        ".scala",
        ".sh",
        ".sql",
        ".swift",
        ".tex",
        ".toml",
        ".ts",
        ".tsx",
        ".yaml",
        ".yml",
    ]
)
NAMES = frozenset({"Dockerfile", "Makefile", "CMakeLists.txt"})
REJECTED_FOLDERS = frozenset(
    [
        ".git",
        ".idea",
        ".svn",
        ".tox",
        ".venv",
        "__pycache__",
        "bower_components",
        "build",
        "coverage",
        "deps",
        "dist",
        "env",
        "node_modules",
        "obj",
        "out",
        "target",
        "third_party",
        "thirdparty",
        "tmp",
        "vendor",
        "vendors",
        "venv",
    ]
)
LOCK_FILES = frozenset(
    [
        "Cargo.lock",
        "Gemfile.lock",
        "Pipfile.lock",
        "composer.lock",
        "go.sum",
        "package-lock.json",
        "poetry.lock",
        "yarn.lock",
    ]
)
TEST_DATA = re.compile(r"(?:^|/)(?:__snapshots__|snapshots?|fixtures?|reports?)/")
GENERATED = re.compile(r"@generated|auto-?generated|do not edit", re.IGNORECASE)


def minimum(name: str, *, keep: float, review: float, required: bool = True) -> Rule:
    """Return a rule: below ``review`` drop, below ``keep`` review; missing is reviewed where required.

    Args:
        name: Metadata field of the score.
        keep: Smallest score to keep.
        review: Smallest score to review.
        required: Whether a missing score matters.

    Returns:
        The rule.
    """

    def rule(record: Record) -> None:
        value = number(record.metadata.get(name))
        if value is None:
            if required:
                record.flags.add(f"missing_{name}")
                record.lower("review", f"missing_{name}")
            return
        record.metrics[name] = value
        if value < keep:
            record.lower("drop" if value < review else "review", f"low_{name}")

    return rule


def maximum(name: str, *, keep: float) -> Rule:
    """Return a rule: above ``keep`` drop, missing review.

    Args:
        name: Metadata field of the count.
        keep: Largest value to keep.

    Returns:
        The rule.
    """

    def rule(record: Record) -> None:
        value = number(record.metadata.get(name))
        if value is None:
            record.flags.add(f"missing_{name}")
            record.lower("review", f"missing_{name}")
        elif value > keep:
            record.lower("drop", f"high_{name}")

    return rule


def compression(record: Record) -> None:
    """Drop text that zlib (level 6) shrinks below 8%: it repeats itself."""
    data = record.text.encode()
    ratio = len(zlib.compress(data, 6)) / len(data) if data else 1.0
    record.metrics["zlib_ratio"] = ratio
    if ratio < 0.08:
        record.lower("drop", "repetitive")


def score_band(record: Record) -> None:
    """Note the score band of a web page (ge4, ge3, lt3); a missing score is reviewed."""
    score = number(record.metadata.get("score"))
    if score is None:
        record.lower("review", "missing_score")
        return
    record.flags.add("ge4" if score >= 4 else "ge3" if score >= 3 else "lt3")


def listed_errors(record: Record) -> None:
    """Drop problems with four or more hard errors, or that a list marks as wrong."""
    errors = number(record.metadata.get("hard_error"))
    if (errors is not None and errors >= 4) or record.metadata.get("listed") is True:
        record.lower("drop", "hard_error")


def agent_priority(record: Record) -> None:
    """Note the priority (0, 1, 2) of a trajectory and its length at 3.6 characters per token."""
    priority = number(record.metadata.get("priority"))
    if priority is not None:
        record.flags.add(f"priority_{priority:.0f}")
    record.metrics["estimated_tokens_agent"] = len(record.text) / 3.6


def notebook(record: Record) -> None:
    """Reduce a notebook to the sources of its cells; anything that is not one is dropped."""
    if not str(record.metadata.get("path", "")).endswith(".ipynb"):
        return
    try:
        cells = json.loads(record.text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError):
        record.lower("drop", "broken_notebook")
        return
    record.text = "\n\n".join(source for source in sources if source.strip())


def github_file(record: Record) -> None:
    """Drop files by path, binary content, generated markers and minified lines."""
    path = PurePosixPath(str(record.metadata.get("path", "")))
    if path.name and path.suffix.lower() not in SUFFIXES and path.name not in NAMES:
        record.lower("drop", "file_type")
    if REJECTED_FOLDERS.intersection(path.parts[:-1]):
        record.lower("drop", "rejected_folder")
    if path.name in LOCK_FILES:
        record.lower("drop", "lock_file")
    if TEST_DATA.search(str(path)):
        record.lower("drop", "test_data")
    if "\0" in record.text[:8192]:
        record.lower("drop", "binary")
    if GENERATED.search(record.text[:2000]):
        record.lower("drop", "generated_file")
    if is_minified(record.text):
        record.lower("drop", "minified")


def is_minified(text: str) -> bool:
    """Whether a file of 2,000 characters or more has a line above 200,000, or under 10 lines of mean above 1,000."""
    if len(text) < 2000:
        return False
    lines = text.split("\n")
    return max(map(len, lines)) > 200_000 or (len(lines) < 10 and len(text) / len(lines) > 1000)
