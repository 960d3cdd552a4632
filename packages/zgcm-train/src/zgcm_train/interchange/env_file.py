"""Read a file of shell assignments without running it.

Understood are comments, ``set`` lines and ``[export] KEY=VALUE`` with quotes, ``$NAME``, ``${NAME}``,
``${NAME:-default}`` and ``${NAME:?message}``, nested. Whatever would run a command is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zgcm_train.errors import ConfigurationError, PathError

_ASSIGNMENT = re.compile(r"(?:export\s+)?(?P<key>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATOR = re.compile(r":-|:=|:\?|-|=|\?")
_IGNORED = re.compile(r"#|set\s+[-+]|export\s+[A-Za-z_][A-Za-z0-9_]*\s*$")


@dataclass(frozen=True)
class Assignment:
    """A variable and where it was set.

    Attributes:
        key: its name.
        value: expanded; a variable that is not set anywhere stays as ``${NAME}``.
        line: number in the file, from 1.
    """

    key: str
    value: str
    line: int


def read_env_file(path: Path, environment: Mapping[str, str]) -> dict[str, Assignment]:
    """Read the assignments of a file; a later one of the same name wins, as in a shell.

    Args:
        path: the file.
        environment: variables that are set outside; an assignment in the file hides one.

    Returns:
        By name, in the order of the file.

    Raises:
        PathError: the file is missing or not UTF-8.
        ConfigurationError: a line is no assignment, or would run a command.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PathError(f"There is no env file {path}; check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PathError(f"The env file {path} cannot be read as UTF-8 text: {error}.") from None
    found: dict[str, Assignment] = {}
    known = dict(environment)
    for number, line in _lines(text):
        if not line or _IGNORED.match(line):
            continue
        where = f"{path}, line {number}"
        match = _ASSIGNMENT.fullmatch(line)
        if match is None:
            raise ConfigurationError(
                f"{where}: {line!r} is no assignment; only KEY=VALUE lines can be imported."
            )
        value = _Value(match["value"], known, where).read()
        known[match["key"]] = value
        found[match["key"]] = Assignment(match["key"], value, number)
    return found


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the lines with their numbers, those that end in a backslash joined with the next."""
    joined, start, waiting = [], 0, ""
    for number, line in enumerate(text.split("\n"), 1):
        start = start or number
        if line.endswith("\\"):
            waiting += line[:-1]
            continue
        joined.append((start, (waiting + line).strip()))
        start, waiting = 0, ""
    return [*joined, (start, waiting.strip())] if waiting else joined


class _Value:
    """Reads the right side of one assignment."""

    def __init__(self, text: str, known: Mapping[str, str], where: str) -> None:
        self._text, self._known, self._where, self._at = text, known, where, 0

    def read(self) -> str:
        """Return the value of the whole text."""
        value = self._word(" \t")
        rest = self._text[self._at :].strip()
        if rest and not rest.startswith("#"):
            raise ConfigurationError(f"{self._where}: {rest!r} after the value; quote values with spaces.")
        return value

    def _word(self, stops: str, *, quoted: bool = False) -> str:
        """Return the text up to one of the stops, expanded; the stop is left."""
        out = ""
        while self._at < len(self._text) and self._text[self._at] not in stops:
            out += self._piece(quoted)
        return out

    def _piece(self, quoted: bool) -> str:
        char = self._text[self._at]
        self._at += 1
        if char == "\\":
            self._at += 1
            return self._text[self._at - 1 : self._at]
        if char == "'" and not quoted:
            return self._until("'")
        if char == '"':
            inner = self._word('"', quoted=True)
            self._skip('"')
            return inner
        if char == "$":
            return self._variable()
        if char in "`;|&<>()" and not (quoted and char != "`"):
            raise ConfigurationError(
                f"{self._where}: {char!r} would run a command; only values are imported."
            )
        return char

    def _variable(self) -> str:
        if self._text[self._at : self._at + 1] != "{":
            name = _NAME.match(self._text, self._at)
            if name is None:
                fault = (
                    "'$(' would run a command"
                    if self._text.startswith("(", self._at)
                    else "'$' without a name"
                )
                raise ConfigurationError(f"{self._where}: {fault}; only values and variables are imported.")
            self._at = name.end()
            return self._known.get(name[0], f"${{{name[0]}}}")
        name = _NAME.match(self._text, self._at + 1)
        if name is None:
            raise ConfigurationError(f"{self._where}: '${{' without a name; only variables are expanded.")
        self._at = name.end()
        operator = _OPERATOR.match(self._text, self._at)
        default = None
        if operator is not None:
            self._at = operator.end()
            word = self._word("}", quoted=True)
            default = None if "?" in operator[0] else word
        self._skip("}")
        value = self._known.get(name[0])
        empty_counts = operator is None or ":" not in operator[0]
        if value is None or not (value or empty_counts):
            return f"${{{name[0]}}}" if default is None else default
        return value

    def _until(self, end: str) -> str:
        stop = self._text.find(end, self._at)
        inner = self._text[self._at : stop]
        self._at = stop if stop >= 0 else len(self._text)
        self._skip(end)
        return inner

    def _skip(self, char: str) -> None:
        if self._text[self._at : self._at + 1] != char:
            raise ConfigurationError(f"{self._where}: {char!r} is missing at the end of {self._text!r}.")
        self._at += 1
