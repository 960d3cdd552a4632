"""One fact, one place: a published number stands in one Python file, everything else reads it there."""

import ast

import pytest

NUMBERS = [
    ("first quintic coefficient", 4.0848, "zgcm_optim"),
    ("last quintic coefficient", 1.2012, "zgcm_optim"),
    ("classic coefficient", 3.4445, "zgcm_optim"),
    ("share of rotated dims", 0.334, "zgcm_model"),
    ("base of the rotation", 5e6, "zgcm_model"),
    ("rows of the vocabulary in training", 154_880, "zgcm_model"),
    ("rows of the published vocabulary", 155_136, "zgcm_model"),
    ("feed-forward width", 11_008, "zgcm_model"),
    ("seed of the global shuffle", 20260603, "zgcm_data"),
]
"""Numbers that mean one thing wherever they stand."""

DEFAULTS = [
    ("window", 128, "zgcm_model"),
    ("global_every", 6, "zgcm_model"),
    ("init_std", 0.02, "zgcm_model"),
    ("norm_eps", 1e-6, "zgcm_model"),
]
"""Numbers that mean something else elsewhere, with the name that they are given to."""


def one_file(files, home):
    """Whether the only one of these modules belongs to a package."""
    return len(files) == 1 and next(iter(files)).startswith(f"{home}.")


def is_number(node, value):
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value == value


@pytest.mark.parametrize(("what", "value", "home"), NUMBERS, ids=[number[0] for number in NUMBERS])
def test_a_published_number_stands_in_one_file(what, value, home, modules):
    files = {m.name for m in modules if any(is_number(node, value) for node in ast.walk(m.tree))}
    assert one_file(files, home), f"{what} {value} stands in {sorted(files)}, not in one file of {home}"


def named_values(tree):
    """Yield (name, value) of assignments, keyword arguments and defaults of parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg, node.value
        elif isinstance(node, ast.arguments):
            plain = [*node.posonlyargs, *node.args]
            yield from ((a.arg, d) for a, d in zip(plain[::-1], node.defaults[::-1], strict=False))
            yield from ((a.arg, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d)


@pytest.mark.parametrize(("name", "value", "home"), DEFAULTS, ids=[default[0] for default in DEFAULTS])
def test_a_default_stands_in_one_file(name, value, home, modules):
    files = {
        module.name
        for module in modules
        for given, node in named_values(module.tree)
        if given.lower() == name and is_number(node, value)
    }
    assert one_file(files, home), f"{name}={value} stands in {sorted(files)}, not in one file of {home}"


def test_what_two_packages_must_spell_alike_is_spelled_alike():
    # Siblings do not import each other, so the name of a format they exchange stands in both; this is the
    # tie.
    from zgcm_data import tokenizer
    from zgcm_data.prepare import heldout
    from zgcm_eval import frozen
    from zgcm_eval.adapters import zgcm

    assert frozen.FORMAT == heldout.FORMAT
    assert tokenizer.END_OF_TEXT == zgcm.END_OF_DOCUMENT
