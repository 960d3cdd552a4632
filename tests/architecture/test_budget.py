"""Size, syntax and manners of the source: short files, short functions, public things described."""

import ast
import re

import pytest

FILE_LINES = 300
"""All but a few files stay within this."""
FILE_LINES_EVER = 400
FUNCTION_LINES = 50
RARELY_OVER = 30
"""Nine functions in ten stay within this many lines."""
PARAMETERS = 7
"""Five as a rule, counting those that are named only."""
PROMISED = {"zgcm_optim.muon:__init__", "zgcm_data.loader.loader:__init__"}
"""Signatures that users rely on as they are."""
VERSIONS = [(3, 11), (3, 12), (3, 13)]


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def body_lines(function):
    """Lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_files_are_short(modules):
    long = {m.where: m.text.count("\n") for m in modules if m.text.count("\n") > FILE_LINES}
    assert max(long.values(), default=0) <= FILE_LINES_EVER, f"over {FILE_LINES_EVER} lines: {long}"
    assert len(long) < 0.03 * len(modules), f"over {FILE_LINES} lines: {long}"


def test_functions_are_short(modules):
    lengths = {f"{m.where}:{f.lineno} {f.name}": body_lines(f) for m in modules for f in functions(m.tree)}
    long = {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES}
    assert not long, f"over {FUNCTION_LINES} lines: {long}"
    share = sum(lines > RARELY_OVER for lines in lengths.values()) / len(lengths)
    assert share < 0.1, f"{share:.0%} of the functions are over {RARELY_OVER} lines"


def parameters(function):
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def test_functions_take_few_parameters(modules):
    many = {
        f"{m.name}:{f.name}": len(parameters(f))
        for m in modules
        for f in functions(m.tree)
        if len(parameters(f)) > PARAMETERS
    }
    assert set(many) <= PROMISED, f"more than {PARAMETERS} parameters, use a configuration object: {many}"


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_every_file_parses_as_each_supported_python(version, root):
    paths = [p for top in ("packages", "tests", "benchmarks") for p in (root / top).rglob("*.py")]
    assert len(paths) > 100
    for path in paths:
        ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=version)


def is_public(name):
    return not name.startswith("_") or name == "__call__"


def undescribed(tree):
    """Yield public functions, classes and methods at the top of a module that have no docstring."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and is_public(node.name):
            if ast.get_docstring(node) is None:
                yield node.name
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    overload = isinstance(inner, ast.FunctionDef) and any(
                        "overload" in ast.unparse(d) or "setter" in ast.unparse(d)
                        for d in inner.decorator_list
                    )
                    method = isinstance(inner, ast.FunctionDef) and is_public(inner.name) and not overload
                    if method and ast.get_docstring(inner) is None:
                        yield f"{node.name}.{inner.name}"


def test_public_things_are_described(modules):
    bare = [f"{m.where} {name}" for m in modules for name in undescribed(m.tree)]
    bare += [
        f"{m.where} (module)"
        for m in modules
        if m.text.strip() and not ast.get_docstring(m.tree) and not m.name.endswith("_version")
    ]
    assert not bare, "\n".join(bare)


MANNERS = {
    "an unfinished mark": r"#.*\b(TODO|FIXME|XXX)\b",
    "a placeholder": r"raise NotImplementedError",
    "a bare except": r"except\s*:",
    "a swallowed error": r"except[^\n]*:\s*\n?\s*pass\b",
    "a mock in library code": r"unittest\.mock|MagicMock|monkeypatch",
    "a star import": r"^from \S+ import \*",
    "a folder of one machine": r"[\"'\s]/(home|Users|root)/",
}


@pytest.mark.parametrize("what", MANNERS)
def test_library_code_has_none_of(what, modules):
    found = [
        f"{m.where}:{m.text[: match.start()].count(chr(10)) + 1}"
        for m in modules
        for match in re.finditer(MANNERS[what], m.text, re.MULTILINE)
    ]
    assert not found, f"{what} in {found}"


def test_no_test_is_skipped_without_saying_what_it_needs(root):
    skip = re.compile(r"(pytest\.skip|mark\.skip|mark\.skipif|pytest\.importorskip|mark\.xfail)\(")
    for path in [p for top in ("packages", "tests") for p in (root / top).rglob("test_*.py")]:
        text = path.read_text(encoding="utf-8")
        for match in skip.finditer(text):
            line = f"{path.relative_to(root)}:{text[: match.start()].count(chr(10)) + 1}"
            call = text[match.start() : match.start() + 300]
            assert re.search(r"reason=|cuda|GPU", call), f"{line} does not say why the test is left out"
            assert "xfail" not in match.group(), f"{line} expects a failure; mend it or delete the test"
