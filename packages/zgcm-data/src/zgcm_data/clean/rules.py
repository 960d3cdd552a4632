"""What a document of each category must fulfil; every rule lowers a decision and names its reason.

Source: thresholds of the public release of the ZGCM-1 data pipeline, 0.1.0.
"""

import re
from collections.abc import Callable
from typing import Any

from zgcm_data.records import Record

Rule = Callable[[Record], None]

DROPPED_PATHS = ("node_modules/", "vendor/", ".min.js", ".map")
GENERATED = re.compile(r"@generated|auto-?generated|generated (?:by|from)|do not edit", re.IGNORECASE)
CODE_SIGNAL = re.compile(
    r"[{}();=<>\[\]]|^\s*(?:def|class|import|from|func|fn|let|var|if|for|#include)\b", re.MULTILINE
)
FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
BOILERPLATE = (
    "accept cookies",
    "all rights reserved",
    "cookie policy",
    "click here",
    "enable javascript",
    "log in",
    "privacy policy",
    "share this",
    "sign up",
    "subscribe",
    "terms of service",
    "terms of use",
)
UNKNOWN_ANSWERS = frozenset({"unknown", "n/a", "none", "i don't know", "not sure", "?"})
REFUSALS = ("as an ai language model", "i cannot assist with", "i'm sorry, but i can't", "i am unable to")
CONTROL_TOKENS = re.compile(r"<\|[a-z_]+\|>|</?s>|\[/?INST\]")
ANSWER_SIGNAL = re.compile(r"answer|therefore|thus|hence|=|\\boxed|∴|答案|因此", re.IGNORECASE)
REASON_SIGNAL = re.compile(r"because|therefore|first|then|step|so |let |since|如果|因为|所以", re.IGNORECASE)
IMAGE = re.compile(r"!\[[^\]]*\]\(|<img |\\includegraphics|\[image\]", re.IGNORECASE)


def code(record: Record) -> None:
    """Drop vendored paths and torn fill-in-the-middle triplets; review generated files and non-code."""
    path = str(record.metadata.get("path", ""))
    if any(part in path for part in DROPPED_PATHS):
        record.lower("drop", "vendored_path")
    if GENERATED.search(record.text[:4096]):
        record.lower("review", "generated_file")
    if record.text.count("\n") < 2 and not CODE_SIGNAL.search(record.text):
        record.lower("review", "no_code_signal")
    present = sum(token in record.text for token in FIM)
    if 0 < present < len(FIM):
        record.lower("drop", "partial_fim")


def web(record: Record) -> None:
    """Review boilerplate, drop repeated lines, and check questions and answers."""
    text = record.text.casefold()
    if sum(phrase in text for phrase in BOILERPLATE) >= 4:
        record.lower("review", "boilerplate")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if lines and len(set(lines)) / len(lines) < 0.45:
        record.lower("drop", "repeated_lines")
    if "question" in record.metadata or "answer" in record.metadata:
        answers(record)


def answers(record: Record) -> None:
    """Check a question-answer pair of a web document."""
    question, answer = field(record, "question"), field(record, "answer")
    if len(question) < 4 or not answer:
        record.lower("drop", "incomplete_qa")
    if answer.casefold() in UNKNOWN_ANSWERS:
        record.lower("drop", "unknown_answer")
    if record.metadata.get("grounded") is False:
        record.lower("review", "not_grounded")
    quality = number(record.metadata.get("model_quality"))
    if quality is not None and quality < 0.8:
        record.lower("drop" if quality < 0.5 else "review", "model_quality")


def math(record: Record) -> None:
    """Check that problem and solution are there and look like it; plain mathematical text passes."""
    if IMAGE.search(record.text) and not record.metadata.get("image_text"):
        record.lower("review", "image_without_text")
    if "problem" not in record.metadata and "solution" not in record.metadata:
        return
    problem, solution = field(record, "problem"), field(record, "solution")
    if not problem or not solution:
        record.lower("drop", "missing_problem_or_solution")
        return
    if len(solution) < 32:
        record.lower("review", "short_solution")
    if not ANSWER_SIGNAL.search(solution):
        record.lower("review", "no_answer_signal")
    if record.metadata.get("verified") is False:
        record.lower("review", "not_verified")


def reasoning(record: Record) -> None:
    """Review control tokens, short traces and traces that never conclude."""
    if CONTROL_TOKENS.search(record.text):
        record.lower("review", "control_tokens")
    if len(record.text) < 64 or not REASON_SIGNAL.search(record.text):
        record.lower("review", "no_reasoning_signal")
    if not ANSWER_SIGNAL.search(record.text[-400:]):
        record.lower("review", "no_final_answer")


def agentic(record: Record) -> None:
    """Check roles, tool calls and outcome where the messages are given."""
    if record.metadata.get("outcome") in ("failed", "failure", False):
        record.lower("review", "failed_outcome")
    messages = record.metadata.get("messages")
    if not isinstance(messages, list):
        return
    if not all(isinstance(item, dict) and item.get("role") for item in messages):
        record.lower("drop", "missing_role")
        return
    if not messages or messages[0]["role"] not in ("system", "user"):
        record.lower("review", "bad_first_role")
    calls = sum(len(item.get("tool_calls") or ()) for item in messages)
    results = sum(item["role"] in ("tool", "function") for item in messages)
    if calls == 0:
        record.lower("review", "no_tool_call")
    if calls != results:
        record.lower("review", "unpaired_tool_call")


def instruction(record: Record) -> None:
    """Drop incomplete or echoing pairs and review refusals."""
    if any(phrase in record.text.casefold() for phrase in REFUSALS):
        record.lower("review", "boilerplate_refusal")
    if "instruction" not in record.metadata and "response" not in record.metadata:
        return
    ask, reply = field(record, "instruction"), field(record, "response")
    if not ask or not reply:
        record.lower("drop", "incomplete_pair")
    elif ask == reply:
        record.lower("drop", "identical_pair")


def pdf_ocr(record: Record) -> None:
    """Review pages with next to no text."""
    if len(record.text) < 32:
        record.lower("review", "short_page")


CATEGORY_RULES: dict[str, Rule] = {
    "code": code,
    "web": web,
    "math": math,
    "reasoning": reasoning,
    "agentic": agentic,
    "instruction": instruction,
    "pdf_ocr": pdf_ocr,
}


def field(record: Record, name: str) -> str:
    """Return a metadata field as stripped text, empty if missing."""
    value: Any = record.metadata.get(name)
    return value.strip() if isinstance(value, str) else ""


def number(value: object) -> float | None:
    """Return a metadata value as a number, ``None`` if it is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
