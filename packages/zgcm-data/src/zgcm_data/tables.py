"""Turn nested tables, as TOML gives them, into dataclasses, with errors that a person can act on."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_origin, get_type_hints


def parse_section(kind: type, data: Mapping[str, Any], where: str) -> Any:
    """Build the dataclass ``kind`` from a table, refusing unknown keys and wrong types.

    Args:
        kind: A dataclass.
        data: The table.
        where: Name of the section with a trailing dot, for messages.

    Returns:
        An instance of ``kind``.

    Raises:
        ValueError: Names the key, the value and the remedy.
    """
    hints = get_type_hints(kind)
    known = [item.name for item in fields(kind)]
    values = {}
    for key, value in data.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"known keys: {', '.join(known)}."
            raise ValueError(f"unknown recipe key {where}{key}; {hint}")
        values[key] = parse_value(hints[key], value, f"{where}{key}")
    return kind(**values)


def parse_value(kind: Any, value: Any, where: str) -> Any:
    """Check one value against its declared type.

    Args:
        kind: A dataclass, a plain type, or a ``dict`` or ``list`` of plain types.
        value: What the recipe says.
        where: Full key, for messages.

    Returns:
        The value, with whole numbers widened to float where a float is declared.

    Raises:
        ValueError: If the type is wrong.
    """
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        return parse_section(kind, value, f"{where}.")
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is dict and isinstance(value, Mapping):
        return {str(key): parse_value(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is list and isinstance(value, list):
        return [parse_value(arguments[0], item, where) for item in value]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is None and isinstance(kind, type) and type(value) is kind:
        return value
    name = getattr(kind, "__name__", str(kind))
    raise ValueError(f"recipe key {where} is {value!r}; it needs a value of type {name}")


def require(good: bool, key: str, value: object, remedy: str) -> None:
    """Raise unless ``good``.

    Args:
        good: The condition.
        key: Recipe key.
        value: Its value.
        remedy: What it must be.

    Raises:
        ValueError: If the condition does not hold.
    """
    if not good:
        raise ValueError(f"recipe key {key} is {value!r}; it must be {remedy}")
