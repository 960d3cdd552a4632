"""Build texts that hide one fact among distractors and filler, and find the fact's value in an answer.

Every prompt is a pure function of its cell, its number and the seed, so two models get the same prompts.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zgcm_eval.protocol import LanguageModel

PLACES = (
    "Amber Bridge", "Birch Hill", "Cedar Lane", "Dover Mill", "Elm Harbour", "Falcon Point", "Granite Bay",
    "Hazel Grove", "Iron Gate", "Juniper Square", "Kestrel Yard", "Linden Court", "Maple Dock", "North Quay",
    "Oak Terrace", "Pine Station",
)  # fmt: skip
"""Names that facts are about; all different, none the beginning of another."""

FILLER = (
    "The morning train was late because of fog on the river.",
    "A gardener trimmed the hedges while the bells rang for noon.",
    "Someone had left an umbrella in the reading room again.",
    "The bakery sold out of rye bread before the rain began.",
    "Two students argued about the shortest way to the museum.",
    "In the evening the square was quiet and the lamps were lit.",
    "The ferry turned around the buoy and headed back to the pier.",
    "An old map of the town hung beside the stairs.",
)
"""Sentences without digits that fill a text up where no natural text is given."""


@dataclass(frozen=True)
class Needle:
    """One prompt with the value that it asks for."""

    prompt: str
    value: str
    distractors: tuple[str, ...]
    """Values of the other facts in the text."""


def build_needle(
    model: LanguageModel, filler: Sequence[str], length: int, depth: float, rng: random.Random
) -> Needle:
    """Hide one fact at a relative depth of a text that fills a length.

    Args:
        model: whose tokenizer counts the length.
        filler: sentences that are repeated in order from a random one on.
        length: longest prompt in tokens, the prefix id included.
        depth: 0 puts the fact at the start of the text, 1 at its end.
        rng: source of the place, the values and the distractors.

    Returns:
        The prompt; it has at most ``length`` tokens and lacks at most one filler sentence.

    Raises:
        ValueError: the facts and the question alone are longer than ``length``.
    """
    places = rng.sample(PLACES, 4)
    values = rng.sample(range(10_000, 100_000), 4)
    facts = [f"The number of {place} is {value}." for place, value in zip(places, values, strict=True)]
    question = f"\nQuestion: What is the number of {places[0]}?\nAnswer: The number of {places[0]} is"
    offset, spots = rng.randrange(len(filler)), sorted(rng.random() for _ in facts[1:])

    def text(sentences: int) -> str:
        body = [filler[(offset + number) % len(filler)] for number in range(sentences)]
        positions = [(depth, facts[0]), *zip(spots, facts[1:], strict=True)]
        for spot, fact in sorted(positions, reverse=True):
            body.insert(round(spot * sentences), fact)
        return " ".join(body) + question

    count = _most_that_fit(lambda sentences: len(model.encode(text(sentences))) + 1 <= length)
    if count < 0:
        raise ValueError(f"length is {length} tokens; the facts and the question alone need more")
    return Needle(text(count), str(values[0]), tuple(str(value) for value in values[1:]))


def _most_that_fit(fits: Callable[[int], bool]) -> int:
    """The largest count that fits, by doubling and then bisection; -1 if not even 0 does."""
    if not fits(0):
        return -1
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def retrieved(answer: str, value: str) -> bool:
    """Whether the first number of an answer is the value, whatever words stand around it."""
    match = re.search(r"\d+(?:[,.]\d{3})*(?!\d)", answer)
    return match is not None and re.sub(r"[,.]", "", match.group()) == value


def sentences_of(texts: Sequence[str]) -> list[str]:
    """Cut natural text into sentences for filler; those with a five-digit number are left out."""
    pieces = (piece.strip() for text in texts for piece in re.split(r"(?<=[.!?])\s+|\n+", text))
    return [piece for piece in pieces if piece and not re.search(r"\d{5}", piece)]


def cell_seed(seed: int, length: int, depth: float, number: int) -> int:
    """A seed of its own for each prompt, so that adding a length or a depth changes no other prompt."""
    text = f"{seed}:{length}:{depth!r}:{number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
