"""Imports: declared, downwards, never in a circle, heavy parts late and in one file each.

``.importlinter`` checks the order of layers; this file checks what it cannot see: circles between single
modules, imports by name, and what stands in ``pyproject.toml``.
"""

import ast
import re
import sys
from collections import defaultdict

import pytest

HEAVY = {
    "transformer_engine", "nvidia", "flash_attn", "ray", "lm_eval", "wandb", "transformers",
    "daft", "pyarrow", "tokenizers", "webdataset",
}  # fmt: skip
"""Parts that an extra installs: imported inside functions only, and within a package in one file each."""

IMPORT_NAMES = {"pytorch": "torch", "tomli-w": "tomli_w", "nvidia-dali-cuda130": "nvidia"}
"""Import name of a requirement where it is not the requirement's own."""


def imported(node):
    """The top-level packages that an import statement or an ``importlib.import_module("...")`` names."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {str(node.module).split(".")[0]}
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func)
        if called.endswith(("import_module", "_import")) and isinstance(node.args[0].value, str):
            return {node.args[0].value.split(".")[0]}
    return set()


def imports_of(nodes):
    return set().union(*(imported(node) for top in nodes for node in ast.walk(top)), set())


def imports_at_import(statements):
    """What importing the module imports: everything outside of function bodies."""
    found = set()
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        found |= imported(statement)
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                found |= imports_at_import([child])
    return found


def requirement_names(requirements):
    names = (re.match(r"[\w.-]+", requirement).group() for requirement in requirements)
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


def test_importing_a_module_needs_declared_dependencies_only(project, modules):
    allowed = (
        requirement_names(project.settings["dependencies"]) | {project.package} | sys.stdlib_module_names
    )
    for module in modules:
        if module.package == project.package:
            extra = imports_at_import(module.top_level) - allowed
            assert not extra, (
                f"{module.where} imports {sorted(extra)} at import time; {project.package} lacks them"
            )


def test_whatever_is_imported_is_declared_somewhere(project, modules):
    extras = project.settings.get("optional-dependencies", {}).values()
    declared = requirement_names(
        [*project.settings["dependencies"], *(name for extra in extras for name in extra)]
    )
    if project.package == "zgcm_train":
        declared |= {"tokenizers", "daft", "pyarrow"}  # of zgcm-data[prepare], which it requires
    for module in modules:
        if module.package == project.package:
            extra = imports_of([module.tree]) - declared - {project.package} - sys.stdlib_module_names
            assert not extra, f"{module.where} imports {sorted(extra)}, which no dependency or extra declares"


def test_heavy_parts_are_imported_late(modules):
    for module in modules:
        early = imports_at_import(module.top_level) & HEAVY
        assert not early, f"{module.where} imports {sorted(early)} when it is imported; do it in the function"


@pytest.mark.parametrize("part", sorted(HEAVY))
def test_a_heavy_part_is_imported_in_one_file_of_a_package(part, modules):
    users = defaultdict(list)
    for module in modules:
        if part in imports_of([module.tree]):
            users[module.package].append(module.where)
    for package, files in users.items():
        assert len(files) == 1, f"{package} imports {part} in {files}; keep it in one file"


def test_siblings_are_imported_by_the_trainer_alone(modules):
    family = {module.package for module in modules}
    for module in modules:
        others = (imports_of([module.tree]) & family) - {module.package}
        if module.package == "zgcm_train":
            continue
        if module.name == "zgcm_eval.adapters.zgcm":
            assert others == {"zgcm_model"}
            assert "zgcm_model" not in imports_at_import(module.top_level)
        else:
            assert not others, f"{module.where} imports its sibling {sorted(others)}"


def edges(module, names):
    """The modules of the same package that a module imports, at import time or later."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in names else str(node.module))
    return {name for name in found if name in names and name.split(".")[0] == module.package} - {module.name}


def test_no_modules_import_each_other_in_a_circle(modules):
    names = {module.name for module in modules}
    graph = {module.name: edges(module, names) for module in modules}
    done = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, [*trail, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    assert len(done) == len(names)


def test_the_spelling_modules_that_the_layers_let_through_import_nothing_of_the_package(modules, root):
    ignored = re.findall(
        r"^\s+\S+ -> (\S+)$", (root / ".importlinter").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert ignored
    for module in modules:
        if module.name in ignored:
            assert module.package not in imports_of([module.tree]), f"{module.where} is no longer a leaf"


def test_relative_imports_are_not_used(modules):
    for module in modules:
        for node in ast.walk(module.tree):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{module.where}:{node.lineno}"
