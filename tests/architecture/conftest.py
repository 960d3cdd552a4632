"""What the tests of the house's rules read: the source files of the five packages."""

import ast
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("zgcm_optim", "zgcm_model", "zgcm_data", "zgcm_eval", "zgcm_train")


@dataclass(frozen=True)
class Module:
    """One Python file below a package's ``src``."""

    path: Path
    name: str

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @cached_property
    def top_level(self) -> list[ast.stmt]:
        """Statements that run when the module is imported, those of ``if TYPE_CHECKING:`` left out."""
        return [
            s for s in self.tree.body if not (isinstance(s, ast.If) and "TYPE_CHECKING" in ast.dump(s.test))
        ]


@dataclass(frozen=True)
class Project:
    """One package with its ``pyproject.toml``."""

    package: str
    folder: Path

    @cached_property
    def settings(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def find_modules() -> list[Module]:
    modules = []
    for package in PACKAGES:
        source = ROOT / "packages" / package.replace("_", "-") / "src"
        for path in sorted((source / package).rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            modules.append(Module(path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return modules


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    found = find_modules()
    assert {module.package for module in found} == set(PACKAGES)
    return found


@pytest.fixture(params=PACKAGES)
def project(request: pytest.FixtureRequest) -> Project:
    return Project(request.param, ROOT / "packages" / request.param.replace("_", "-"))
