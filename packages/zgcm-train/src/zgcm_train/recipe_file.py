"""Read, fill, override and write recipes."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from zgcm_train.config import Recipe
from zgcm_train.errors import ConfigurationError, MissingSettingError, PathError, require_folder

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with this package."""
    folder = resources.files("zgcm_train.recipes")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def recipe_text(name: str) -> str:
    """Return the TOML text of the named recipe.

    Raises:
        ConfigurationError: no recipe of that name comes with this package.
    """
    if name not in recipe_names():
        raise ConfigurationError(
            f"There is no recipe {name!r}; known: {', '.join(recipe_names())}{_nearest(name, recipe_names()) or '.'}"
        )
    return (resources.files("zgcm_train.recipes") / f"{name}.toml").read_text(encoding="utf-8")


def load_recipe(
    source: str | Path, overrides: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Recipe:
    """Read a recipe by name or path, fill variables and apply overrides.

    Args:
        source: the name of a recipe of this package, or a path to a TOML file.
        overrides: texts ``section.key=value``; the value is read as TOML, else as a string.
        environment: variables for ``${VAR}``; the process's own by default.

    Returns:
        The checked recipe.

    Raises:
        PathError: the file is missing or not UTF-8.
        MissingSettingError: a variable without default is not set.
        ConfigurationError: the text is not TOML, or a key or value is wrong.
    """
    values = _parse(_read(source), str(source))
    for override in overrides:
        _apply_override(values, override)
    return check_recipe(_fill(values, environment if environment is not None else os.environ), str(source))


def load_run_recipe(folder: Path) -> Recipe:
    """Read the recipe that a run left in its folder.

    Args:
        folder: the run folder.

    Raises:
        PathError: it is missing, or not the folder of a run.
    """
    file = require_folder(folder, "The run folder") / "recipe.toml"
    if not file.is_file():
        raise PathError(f"{folder} holds no recipe.toml, so it is not the folder of a run; check the path.")
    return load_recipe(file)


def check_recipe(values: Mapping[str, Any], name: str) -> Recipe:
    """Check parsed TOML against the schema.

    Raises:
        ConfigurationError: one sentence per fault; unknown keys come with the nearest known one.
    """
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(f"{name}: " + "; ".join(map(_sentence, _told(error)))) from None


def dump_recipe(recipe: Recipe) -> str:
    """Return the complete effective recipe as TOML; reading it back gives an equal recipe."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    stages = values.pop("stage")
    return tomli_w.dumps(values) + "".join(f"\n[[stage]]\n{tomli_w.dumps(stage)}" for stage in stages)


def _read(source: str | Path) -> str:
    path = Path(source)
    if path.suffix != ".toml" and not path.is_file():  # a folder may have the name of a recipe
        return recipe_text(str(source))
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PathError(
            f"There is no recipe file {path}; `zgcm-train recipes` lists the built-in ones."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PathError(f"The recipe {path} cannot be read as UTF-8 text: {error}.") from None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{name} is not valid TOML: {error}.") from None


def _fill(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, environment) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, environment) for item in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _variable(match, environment), value)
    return value


def _variable(match: re.Match[str], environment: Mapping[str, str]) -> str:
    name, default = match["name"], match["default"]
    found = environment.get(name) or default
    if found is None:
        raise MissingSettingError(f"The recipe needs the environment variable {name}; set it and run again.")
    return found


def _apply_override(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigurationError(f"--set {override!r} is not of the form section.key=value.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    node: Any = values
    for key in keys[:-1]:
        node = _descend(node, key, override)
    if isinstance(node, list):
        raise ConfigurationError(
            f"--set {override!r}: name the entry by its number, as in stage.0.updates=10."
        )
    node[keys[-1]] = value


def _descend(node: Any, key: str, override: str) -> Any:
    if isinstance(node, list):
        if not key.isdigit() or int(key) >= len(node):
            raise ConfigurationError(f"--set {override!r}: there are {len(node)} entries, numbered from 0.")
        return node[int(key)]
    child = node.setdefault(key, {})
    if not isinstance(child, dict | list):
        raise ConfigurationError(f"--set {override!r}: {key} is a value, not a section.")
    return child


def _told(error: ValidationError) -> list[Any]:
    """Return the faults without those that only follow: a list whose entries are wrong counts as too short."""
    faults = error.errors()
    inner = {fault["loc"][:1] for fault in faults if len(fault["loc"]) > 1}
    return [f for f in faults if f["type"] != "too_short" or f["loc"] not in inner]


def _sentence(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        if len(error["loc"]) == 1 and not isinstance(error["input"], dict):
            return f"unknown key {where}; keys stand in sections, as in optimizer.lr"
        return f"unknown key {where}{_nearest(str(error['loc'][-1]), _known_keys(error['loc'][:-1]))}"
    if error["type"] == "missing":
        return f"{where} is missing; every recipe must give it"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message} (got {error['input']!r})" if where else message


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in location:
        if isinstance(part, str):
            model = _section_type(model, part)
    return list(model.model_fields)


def _section_type(model: type[BaseModel], name: str) -> type[BaseModel]:
    annotation = model.model_fields[name].annotation
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return model


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
