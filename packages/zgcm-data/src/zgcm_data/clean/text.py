"""Normalization of text, by category.

| category | what changes |
|---|---|
| code | CRLF and CR become LF; NUL bytes go; nothing else, so every space and tab stays |
| math, latex | the same, other control characters go, Unicode NFC |
| general_text, instruction, reasoning, agentic | the same, and: spaces at line ends go, at most one blank line |
| web, pdf_ocr | the same, and: Latin ligatures spelled out, odd spaces and runs of spaces become one space |

NFKC is used nowhere: it would turn x² into x2.
"""

import hashlib
import re
import unicodedata

CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
LINE_END = re.compile(r"[ \t]+$", re.MULTILINE)
BLANK_LINES = re.compile(r"\n{3,}")
INNER_RUN = re.compile(r"(?<=\S)[ \t]{2,}")
ODD_SPACE = re.compile("[\u00a0\u2000-\u200a\u202f\u3000]")
INVISIBLE = re.compile("[\u00ad\u200b\ufeff]")
LIGATURES = str.maketrans(
    {
        "\ufb00": "ff",
        "\ufb01": "fi",
        "\ufb02": "fl",
        "\ufb03": "ffi",
        "\ufb04": "ffl",
        "\ufb05": "st",
        "\ufb06": "st",
    }
)
SPACE = re.compile(r"\s+")
EXACT = frozenset({"code"})
FORMULAS = frozenset({"math", "latex"})
SCANNED = frozenset({"web", "pdf_ocr"})


def normalize(text: str, category: str) -> str:
    """Return ``text`` as training sees it; see the table of this module.

    Args:
        text: The raw document.
        category: Its category.

    Returns:
        The normalized document; applying it twice changes nothing more.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if category in EXACT:
        return text.replace("\0", "")
    text = unicodedata.normalize("NFC", CONTROLS.sub("", text))
    if category in FORMULAS:
        return text.strip("\n")
    if category in SCANNED:
        text = ODD_SPACE.sub(" ", INVISIBLE.sub("", text.translate(LIGATURES)))
        text = INNER_RUN.sub(" ", text)
    return BLANK_LINES.sub("\n\n", LINE_END.sub("", text)).strip()


def content_key(text: str, category: str) -> str:
    """Return the 128-bit hash under which two documents count as the same text.

    Code is compared exactly but for spaces at its ends; all other text without regard to letter case and
    to the amount of white space.

    Args:
        text: A normalized document.
        category: Its category.

    Returns:
        32 hexadecimal digits.
    """
    text = text.strip() if category in EXACT else SPACE.sub(" ", text.casefold()).strip()
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
