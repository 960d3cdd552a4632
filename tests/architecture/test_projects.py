"""Each package is a product: what it ships, what it requires, what its README shows."""

import importlib
import importlib.metadata
import re
from importlib.resources import files
from pathlib import Path

import pytest


def test_p2_the_installed_package_holds_every_file_of_its_source(project):
    source = project.folder / "src" / project.package
    installed = Path(str(files(project.package)))
    wanted = [
        p.relative_to(source) for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    ]
    assert Path("py.typed") in wanted
    missing = [str(path) for path in wanted if not (installed / path).is_file()]
    assert not missing, f"{project.package} as installed lacks {missing}"


def test_p5_no_path_or_address_stands_in_the_requirements(project):
    name = project.settings["name"]
    for requirement in importlib.metadata.requires(name) or []:
        assert "@" not in requirement, (
            f"{name} requires {requirement!r}; an installed copy could not resolve it"
        )
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?(>=[\d.]+)?(;.*| ;.*)?$", requirement), requirement


def test_siblings_are_not_pinned_to_one_version(project):
    extras = project.settings.get("optional-dependencies", {}).values()
    for requirement in [*project.settings["dependencies"], *(r for extra in extras for r in extra)]:
        if requirement.startswith("zgcm-"):
            assert "==" not in requirement


def test_the_optimizer_requires_torch_alone(root):
    text = (root / "packages/zgcm-optim/pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'dependencies = \[\s*"torch>=[\d.]+",\s*\]', text)


def test_the_version_is_stated_once(project):
    assert project.settings["dynamic"] == ["version"]
    package = importlib.import_module(project.package)
    text = (project.folder / "src" / project.package / "_version.py").read_text(encoding="utf-8")
    assert text == f'__version__ = "{package.__version__}"\n'
    assert importlib.metadata.version(project.settings["name"]) == package.__version__


def test_license_python_and_files_are_stated_alike(project, root):
    assert project.settings["license"] == "Apache-2.0"
    assert project.settings["requires-python"] == ">=3.11"
    assert (project.folder / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()
    changelog = (project.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "\n## [Unreleased]\n" in changelog
    assert re.search(r"\n### (Added|Changed|Fixed)\n+- ", changelog), "say what there is under [Unreleased]"


def test_the_readme_has_an_example_that_a_test_of_the_package_runs(project):
    readme = (project.folder / "README.md").read_text(encoding="utf-8")
    assert "```python\n" in readme
    assert f"pip install {project.settings['name']}" in readme.replace('"', "").replace("./packages/", "")
    tests = [p.read_text(encoding="utf-8") for p in (project.folder / "tests").rglob("test_*.py")]
    runs = [text for text in tests if "README.md" in text and re.search(r"exec\(|subprocess|doctest", text)]
    assert runs, f"no test below {project.folder.name}/tests runs the README's example"


def test_links_between_documents_lead_somewhere(root):
    documents = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "packages").glob("*/*.md")]
    assert len(documents) >= 10
    for document in documents:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (document.parent / target).exists(), f"{document.relative_to(root)} links to {target}"


@pytest.mark.parametrize("name", ["zgcm-data", "zgcm-eval", "zgcm-train"])
def test_commands_are_declared(name, root):
    text = (root / "packages" / name / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf'\[project\.scripts\]\n{name} = "{name.replace("-", "_")}\.cli:\w+"', text)


def test_p3_no_two_packages_share_a_namespace(project):
    source = project.folder / "src"
    tops = sorted(path.name for path in source.iterdir() if path.name != "__pycache__")
    assert tops == [project.package], f"{source} holds {tops}; one import package per distribution"
    assert (source / project.package / "__init__.py").is_file()
