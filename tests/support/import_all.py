"""Import every module of the named packages; fail with the list of those that do not import."""

import importlib
import pkgutil
import sys
import traceback


def main(packages: list[str]) -> int:
    """Import all modules below each package and return how many failed."""
    failed = 0
    for package in packages:
        root = importlib.import_module(package)
        names = [package, *(m.name for m in pkgutil.walk_packages(root.__path__, f"{package}."))]
        for name in names:
            if name.endswith("__main__"):
                continue
            try:
                importlib.import_module(name)
            except Exception:
                failed += 1
                traceback.print_exc()
                print(f"{name} does not import with core dependencies alone", file=sys.stderr)
        print(f"{package}: {len(names)} modules imported")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
