"""Split a Python module into its code and its long docstrings, by parsing and never importing it."""

import ast
import inspect
from dataclasses import dataclass


@dataclass(frozen=True)
class Module:
    """A parsed module.

    Args:
        code: The source with the long docstrings cut out, byte for byte otherwise.
        docstrings: Those docstrings, dedented, in the order of the file.
    """

    code: str
    docstrings: list[str]


def split_module(text: str, minimum: int) -> Module | None:
    """Split a module into code and docstrings.

    Args:
        text: Python source.
        minimum: Docstrings of fewer characters stay in the code.

    Returns:
        The parts, or ``None`` if this Python cannot parse the text.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found: list[tuple[int, int, str, bool]] = []
    gather(tree, minimum, found)
    lines = text.split("\n")
    for first, last, _, alone in sorted(found, reverse=True):
        indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
        lines[first - 1 : last] = [f"{indent}..."] if alone else []
    return Module("\n".join(lines), [item[2] for item in sorted(found)])


def long_strings(text: str, minimum: int) -> int:
    """Estimate, without parsing, how many characters of a module stand in long triple-quoted strings.

    Args:
        text: Python source.
        minimum: Characters from which a string is long.

    Returns:
        The estimate; 0 means that parsing would find no long docstring between triple double quotes.
    """
    return sum(len(part) for part in text.split('"""')[1::2] if len(part) >= minimum)


def gather(node: ast.AST, minimum: int, found: list[tuple[int, int, str, bool]]) -> None:
    """Append (first line, last line, text, whether nothing else is in the body) of long docstrings.

    Only statements are visited: docstrings never stand inside expressions, and expressions are most of a
    syntax tree.
    """
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            value = first.value.value
            if isinstance(value, str) and len(value) >= minimum and first.end_lineno is not None:
                found.append((first.lineno, first.end_lineno, inspect.cleandoc(value), len(body) == 1))
    for child in (*body, *getattr(node, "orelse", ()), *getattr(node, "handlers", ())):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            gather(child, minimum, found)


def literal_strings(text: str) -> dict[str, str]:
    """Return the string entries of the first dictionary that a module assigns.

    Args:
        text: Python source, e.g. of ``pydoc_data/topics.py``.

    Returns:
        Key to text; empty if there is no such dictionary.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            pairs = zip(statement.value.keys, statement.value.values, strict=True)
            return {
                str(ast.literal_eval(key)): str(ast.literal_eval(value))
                for key, value in pairs
                if key is not None
            }
    return {}
