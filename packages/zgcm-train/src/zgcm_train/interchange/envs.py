"""Turn the published launcher's env files into a recipe: one stage per file, every variable accounted for."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zgcm_train.config import Recipe
from zgcm_train.errors import ConfigurationError, MissingSettingError
from zgcm_train.interchange.datasets import dataset_values
from zgcm_train.interchange.env_file import Assignment, read_env_file
from zgcm_train.interchange.keys import JOINT, PRESET, Fixed, LeftOut, Mapped, rules
from zgcm_train.interchange.stages import joint_values
from zgcm_train.recipe_file import check_recipe, dump_recipe

# What the launcher says on its command line and not in its files.
LAUNCHER = {
    "model.preset": PRESET,
    "optimizer.nesterov": False,
    "precision.compute": "bfloat16",
    "data.cross_document_attention": True,
    "parallel.sequence_parallel": True,
}


@dataclass(frozen=True)
class KeyReport:
    """What became of one variable.

    Attributes:
        file: where it was set.
        key: its name.
        value: as expanded.
        status: ``mapped``, ``fixed`` (it says what holds anyway), ``left out`` or ``unknown``.
        detail: the recipe key, or the reason.
    """

    file: str
    key: str
    value: str
    status: str
    detail: str


@dataclass(frozen=True)
class ImportedRecipe:
    """A recipe and how it came about.

    Attributes:
        recipe: checked.
        keys: one report per variable and file, in their order.
    """

    recipe: Recipe
    keys: tuple[KeyReport, ...]

    def text(self) -> str:
        """Return the recipe as TOML."""
        return dump_recipe(self.recipe)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"recipe": self.text(), "keys": [asdict(key) for key in self.keys]}


def import_env_files(
    files: Sequence[Path], environment: Mapping[str, str], *, allow_unknown: bool = False
) -> ImportedRecipe:
    """Read env files, one per stage, in the order in which the stages follow each other.

    Args:
        files: each is read by itself and never run.
        environment: variables that are set outside the files.
        allow_unknown: report variables that this version does not know instead of refusing them.

    Returns:
        The recipe, which is checked, and a report on every variable.

    Raises:
        PathError: a file cannot be read.
        MissingSettingError: a setting that the recipe needs is nowhere.
        ConfigurationError: a file holds more than assignments, an unknown variable, or settings that contradict each
            other; all contradictions are named together.
    """
    values: dict[str, Any] = dict(LAUNCHER)
    reports: list[KeyReport] = []
    stages: list[dict[str, Any]] = []
    problems: list[str] = []
    for path in files:
        read = read_env_file(path, environment)
        single = _Single(path.name, problems)
        facts, notes = dataset_values(path.name, read, problems)
        found = single.values(read) | joint_values(path.name, read, stages, problems) | facts
        told = (single.report(assignment, found) for assignment in read.values())
        reports += [replace(r, status="mapped", detail=notes[r.key]) if r.key in notes else r for r in told]
        stages.append({name[6:]: found.pop(name) for name in list(found) if name.startswith("stage.")})
        _merge(values, found, path.name, problems)
    unknown = [r for r in reports if r.status == "unknown"]
    if unknown and not allow_unknown:
        problems += [f"{r.file}: unknown variable {r.key}" for r in unknown]
        problems.append("--allow-unknown reports unknown variables and goes on")
    if problems:
        raise ConfigurationError("The env files cannot be imported: " + "; ".join(problems) + ".")
    recipe = check_recipe(_nested(values, stages), "the imported recipe")
    return ImportedRecipe(recipe, tuple(reports))


class _Single:
    """Applies the rules of single variables to one file."""

    def __init__(self, file: str, problems: list[str]) -> None:
        self._file, self._problems, self._rules = file, problems, rules()

    def values(self, read: Mapping[str, Assignment]) -> dict[str, Any]:
        """Return recipe keys and their values; note what contradicts."""
        found = {}
        for key, rule in self._rules.items():
            if key not in read or isinstance(rule, LeftOut):
                continue
            text = read[key].value
            if text.startswith("${"):
                raise MissingSettingError(f"{self._file}: {key} needs {text}; set it and run again.")
            try:
                value = rule.read(text)
            except ValueError as error:
                self._problems.append(f"{self._file}: {key}={text} {error}")
                continue
            if isinstance(rule, Mapped):
                found[rule.key] = value
            elif value != rule.value:
                self._problems.append(
                    f"{self._file}: {key}={text} cannot be imported, {rule.value} holds here ({rule.why})"
                )
        return found

    def report(self, assignment: Assignment, found: Mapping[str, Any]) -> KeyReport:
        """Say what became of a variable."""
        key, rule = assignment.key, self._rules.get(assignment.key)
        if key in JOINT:
            status, detail = "mapped", JOINT[key]
            if detail == "checked":
                status, detail = (
                    "left out",
                    "a stage begins at row 0 of its own data; checked against the others",
                )
            elif key == "MIN_LR" and detail not in found:
                status, detail = "left out", "without effect on a constant learning rate"
            elif detail != "stage.updates" and detail not in found:
                status, detail = "left out", "empty"
        elif isinstance(rule, Mapped):
            status, detail = "mapped", rule.key
        elif isinstance(rule, Fixed | LeftOut):
            status, detail = ("fixed" if isinstance(rule, Fixed) else "left out"), rule.why
        else:
            status, detail = "unknown", "not a variable of the published launcher"
        return KeyReport(self._file, key, assignment.value, status, detail)


def _merge(values: dict[str, Any], found: Mapping[str, Any], file: str, problems: list[str]) -> None:
    """Add a stage's run-wide settings, which must be those of the stages before."""
    for key, value in found.items():
        if key in LAUNCHER or values.setdefault(key, value) == value:
            continue
        problems.append(
            f"{file}: {key} is {value} and {values[key]} in the files before; import it as a run of its own"
        )


def _nested(values: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    recipe: dict[str, Any] = {}
    for path, value in values.items():
        section, _, key = path.partition(".")
        recipe.setdefault(section, {})[key] = value
    names = [str(stage["name"]) for stage in stages]
    recipe.setdefault("run", {})["name"] = "+".join(names)
    return recipe | {"stage": [dict(stage) for stage in stages]}
