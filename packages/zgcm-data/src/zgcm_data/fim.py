"""Fill-in-the-middle for code: a document is cut in three and the middle is moved to the end.

Order: prefix token, prefix, suffix token, suffix, middle token, middle (called PSM). Which documents, and
where they are cut, follows from a keyed hash of the id: the same on every machine.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022.
"""

from dataclasses import dataclass

from zgcm_data.records import keyed_hash

TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@dataclass(frozen=True)
class Cut:
    """Where a document is cut, in characters.

    Args:
        start: First character of the middle.
        stop: One past its last.
    """

    start: int
    stop: int

    def parts(self, text: str) -> tuple[str, str, str]:
        """Return prefix, suffix and middle, the order in which they are learned."""
        return text[: self.start], text[self.stop :], text[self.start : self.stop]


def choose_cut(name: str, length: int, rate: float, seed: int) -> Cut | None:
    """Decide whether and where a document is cut.

    Args:
        name: Its id.
        length: Its characters.
        rate: Part of the documents that is cut, 0 to 1.
        seed: Key of the choice.

    Returns:
        The cut, or ``None`` if the document stays as it is.
    """
    chance = keyed_hash(f"fim:{seed}", name)
    if length < 3 or int(chance[:8], 16) >= rate * 2**32:
        return None
    places = sorted(int(chance[part : part + 8], 16) * (length + 1) >> 32 for part in (8, 16))
    return Cut(places[0], places[1]) if places[0] < places[1] else None
