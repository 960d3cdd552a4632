"""Compare a built wheel with the source tree: every file of the package must be in it, py.typed included."""

import sys
import zipfile
from pathlib import Path


def missing_files(wheel: Path, source: Path) -> list[str]:
    """Return the files below ``source`` that the wheel lacks, and ``py.typed`` if the tree lacks it too.

    Args:
        wheel: the built wheel.
        source: the package's ``src`` folder.
    """
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    wanted = {
        str(p.relative_to(source)) for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    wanted.add(f"{next(source.iterdir()).name}/py.typed")
    return sorted(wanted - packed)


if __name__ == "__main__":
    missing = missing_files(Path(sys.argv[1]), Path(sys.argv[2]))
    if missing:
        sys.exit(f"{sys.argv[1]} lacks {missing}")
