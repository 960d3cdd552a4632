"""The public names of each package are pinned; a change here is a change of the package's contract.

``public_names/PACKAGE.txt`` holds ``__all__``, a name per line. Removing or renaming one is a breaking
release and needs a decision record; adding one needs a line in the changelog.
"""

import importlib
from pathlib import Path

PINS = Path(__file__).parent / "public_names"


def test_all_is_what_was_pinned(project):
    names = sorted(importlib.import_module(project.package).__all__)
    pinned = (PINS / f"{project.package}.txt").read_text(encoding="utf-8").split()
    added, gone = sorted(set(names) - set(pinned)), sorted(set(pinned) - set(names))
    meant = f"added {added}, gone {gone}; if it is meant, edit {PINS.name}/{project.package}.txt"
    assert added + gone == [], meant
    assert pinned == sorted(pinned)


def test_every_public_name_exists_and_none_leaks(project):
    package = importlib.import_module(project.package)
    for name in package.__all__:
        assert getattr(package, name) is not None
    ours = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("zgcm_")
    }
    leaks = sorted(ours - set(package.__all__))
    assert not leaks, f"{project.package} shows {leaks} without listing them in __all__"
