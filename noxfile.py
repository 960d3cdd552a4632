"""Every command a person needs to work on ZGCM. `nox -l` lists them; a plain `nox` runs what CI runs."""

import os
import re
import shutil
import tempfile
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = ("optim", "model", "data", "eval", "train")
MEASURED = ("optim", "model", "data", "eval", "train")
COMMANDS = ("data", "eval", "train")
CONSTRAINTS = ROOT / "constraints.txt"
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
# Two files of tests at a time, on one thread each. A file stays in one process: its tests share what they set up.
TWO_AT_A_TIME = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
# What the tests of a package need beyond it: torch's distributed checkpoint gathers objects through numpy.
TEST_NEEDS = {"optim": ("numpy",)}
EXTRAS = {"data": "[prepare]", "eval": "[math]"}

# These tests rest on torch alone, whose lowest version is the one that every session tests.
TORCH_ALONE = (
    *(f"zgcm-model/tests/test_{n}*.py" for n in ("context", "tensor", "precision", "kernels", "generate")),
    *(f"zgcm-model/tests/test_{n}.py" for n in ("decoder", "loss", "outliers", "gpu_kernels")),
    *(f"zgcm-train/tests/test_{n}.py" for n in ("distributed", "layouts", "pipeline", "fp8", "scale")),
    *(f"zgcm-train/tests/test_{n}.py" for n in ("counting", "meeting", "reductions", "replicas", "watchdog")),
)

# virtualenv keeps wheels and interpreter facts; inside the clone, like everything else.
os.environ["VIRTUALENV_OVERRIDE_APP_DATA"] = str(ROOT / ".nox" / "virtualenv")

nox.needs_version = ">=2024.10"
nox.options.sessions = (
    "lint",
    "layers",
    "types",
    "imports",
    "build",
    "lowest",
    "shapes",
    "dali",
    "tests",
    "integration",
)
nox.options.reuse_existing_virtualenvs = True
nox.options.stop_on_first_error = False


def source(*packages: str, extras: bool = True) -> list[str]:
    """Return what pip installs for these packages from the tree."""
    return [f"{ROOT}/packages/zgcm-{p}{EXTRAS.get(p, '') if extras else ''}" for p in packages]


def install(session: nox.Session, *what: str) -> None:
    """Install with the versions of constraints.txt; no byte code, which saves half the time."""
    session.install("--no-compile", "-c", str(CONSTRAINTS), *what)


def run(session: nox.Session, *command: str, **variables: str) -> None:
    """Run a command whose temporary and cache files stay inside the clone."""
    scratch = ROOT / ".nox" / "scratch"
    for folder in ("tmp", "matplotlib"):
        (scratch / folder).mkdir(parents=True, exist_ok=True)
    session.run(
        *command,
        env={
            "TMPDIR": str(scratch / "tmp"),
            "MPLCONFIGDIR": str(scratch / "matplotlib"),
            "HF_HOME": str(scratch / "huggingface"),
            "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
            "PYTHONDONTWRITEBYTECODE": "1",
            **variables,
        },
    )


def pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest with the settings of the root pyproject.toml."""
    command = ("python", "-m", "pytest", "-o", f"cache_dir={ROOT}/.nox/scratch/pytest")
    threads = {"OMP_NUM_THREADS": "1"} if "-n" in arguments else {}
    run(session, *command, *arguments, *session.posargs, **threads)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small model on real text in two stages and show the result in demo/report.html."""
    install(session, *source(*PACKAGES))
    run(session, "zgcm-train", "demo", "--out", "demo", *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """Test one package in an environment that holds only it and its own dependencies."""
    wanted = PACKAGES if package == "train" else (package,)
    install(session, *TEST_TOOLS, *TEST_NEEDS.get(package, ()), *source(*wanted))
    pytest(session, *TWO_AT_A_TIME, f"packages/zgcm-{package}/tests")


@nox.session
def integration(session: nox.Session) -> None:
    """Test the packages together, and the rules of the house."""
    install(session, *TEST_TOOLS, *source(*PACKAGES))
    pytest(session, *TWO_AT_A_TIME, "tests/integration", "tests/architecture")  # the longest file first


@nox.session
def shapes(session: nox.Session) -> None:
    """Test again with every shape in a signature checked at run time."""
    install(session, *TEST_TOOLS, "beartype", *source("model", "eval"))
    for package in ("model", "eval"):
        hook = f"--jaxtyping-packages=zgcm_{package},beartype.beartype"
        pytest(
            session, *TWO_AT_A_TIME, hook, f"packages/zgcm-{package}/tests", "-m", "not slow and not compiles"
        )


@nox.session
def dali(session: nox.Session) -> None:
    """Test the loader beside NVIDIA DALI's and Megatron's own readers; no GPU is needed."""
    install(session, *TEST_TOOLS, f"{ROOT}/packages/zgcm-data[prepare,dali]", "megatron-core")
    pytest(session, "packages/zgcm-data/tests/online/dali", "packages/zgcm-data/tests/online/megatron_core")


@nox.session
def cluster(session: nox.Session) -> None:
    """Build data on a local Ray cluster and from an object store that the tests start."""
    # Of constraints.txt only torch: botocore refuses the python-dateutil that stands there.
    (torch,) = (line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    what = (f"{ROOT}/packages/zgcm-data[prepare,ray]", "moto[server]", "boto3")
    session.install("--no-compile", torch, *TEST_TOOLS, *what)
    pytest(session, "packages/zgcm-data/tests/offline/cluster")


@nox.session
def extras(session: nox.Session) -> None:
    """Evaluate with the real transformers and lm-eval; needs a minute of downloads, so it is not part of CI."""
    install(session, *TEST_TOOLS, f"{ROOT}/packages/zgcm-eval[harness,huggingface]")
    pytest(
        session, *(f"packages/zgcm-eval/tests/extras/check_{name}.py" for name in ("huggingface", "lm_eval"))
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and layout with ruff; `nox -s lint -- fix` mends what can be mended."""
    install(session, "ruff")
    if "fix" in session.posargs:
        run(session, "ruff", "check", "--fix", ".")
        run(session, "ruff", "format", ".")
    else:
        run(session, "ruff", "check", ".")
        run(session, "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the five packages with mypy, strictly."""
    install(session, "mypy", *source(*PACKAGES))
    cache = ROOT / ".nox" / "scratch" / "mypy"
    run(session, "mypy", "--cache-dir", str(cache), *(f"packages/zgcm-{p}/src" for p in PACKAGES))


@nox.session
def layers(session: nox.Session) -> None:
    """Check that imports point down and siblings leave each other alone."""
    install(session, "import-linter", *source(*PACKAGES))
    run(session, "lint-imports", "--no-cache")


@nox.session
def imports(session: nox.Session) -> None:
    """Import every module with core dependencies alone, the four leaves first, then zgcm-train."""
    install(session, *source("optim", "model", "data", "eval", extras=False))
    run(
        session, "python", "tests/support/import_all.py", "zgcm_optim", "zgcm_model", "zgcm_data", "zgcm_eval"
    )
    install(session, *source(*PACKAGES, extras=False))
    run(session, "python", "tests/support/import_all.py", "zgcm_train")


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist, then wheel from the sdist; install it outside the tree, import it, run its command."""
    install(session, "hatchling", "build")
    with tempfile.TemporaryDirectory() as folder:
        wheels = [build_wheel(session, package, Path(folder)) for package in PACKAGES]
        for package, wheel in zip(PACKAGES, wheels, strict=True):
            try_wheel(session, package, wheels if package == "train" else [wheel], Path(folder))


def build_wheel(session: nox.Session, package: str, folder: Path) -> Path:
    """Build one package as a release would; return its wheel."""
    out = folder / f"dist-{package}"
    session.run("python", "-m", "build", "-q", "--no-isolation", "-o", str(out), f"packages/zgcm-{package}")
    (wheel,) = out.glob("*.whl")
    session.run("python", "tests/support/check_wheel.py", str(wheel), f"packages/zgcm-{package}/src")
    return wheel


def try_wheel(session: nox.Session, package: str, wheels: list[Path], folder: Path) -> None:
    """Install wheels into a fresh environment outside the tree, import the package and run its command."""
    environment = folder / f"env-{package}"
    session.run("python", "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    session.run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-compile",
        "-c",
        str(CONSTRAINTS),
        *map(str, wheels),
        external=True,
    )
    with session.chdir(folder):
        session.run(python, "-c", f"import zgcm_{package}; print(zgcm_{package}.__version__)", external=True)
        if package in COMMANDS:
            session.run(str(environment / "bin" / f"zgcm-{package}"), "--version", external=True)
    shutil.rmtree(environment)


@nox.session
def lowest(session: nox.Session) -> None:
    """Test with the lowest declared version of every direct dependency what rests on more than torch.

    Left out are zgcm-optim, which needs torch alone, the files of ``TORCH_ALONE`` and tests marked slow: torch has one
    version here and in all other sessions, so that they would repeat what those have tested.
    """
    install(session, *TEST_TOOLS)
    session.install("--no-compile", *lowest_requirements(), *source(*PACKAGES))
    folders = [f"packages/zgcm-{p}/tests" for p in PACKAGES if p != "optim"]
    pytest(session, *TWO_AT_A_TIME, *folders, *left_out(session), "-m", "not slow", "-q")


def left_out(session: nox.Session) -> list[str]:
    """Return the options that leave out the files of ``TORCH_ALONE``, each of which must be there."""
    for pattern in TORCH_ALONE:
        if not list((ROOT / "packages").glob(pattern)):
            session.error(f"TORCH_ALONE names {pattern}, which matches no file; mend noxfile.py")
    return [f"--ignore-glob={ROOT}/packages/{pattern}" for pattern in TORCH_ALONE]


def lowest_requirements() -> list[str]:
    """Return every direct dependency of the packages, pinned to the lowest version that it declares."""
    pinned = {}
    for package in PACKAGES:
        project = tomllib.loads((ROOT / f"packages/zgcm-{package}/pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project.get("optional-dependencies", {}).get("prepare", [])]
        for requirement in wanted:
            name, _, version = re.sub(r"\[.*?\]", "", requirement).partition(">=")
            if not name.startswith("zgcm-"):
                pinned[name] = f"{name}=={version}"
    return sorted(pinned.values())


@nox.session
@nox.parametrize("package", MEASURED, ids=MEASURED)
def bench(session: nox.Session, package: str) -> None:
    """Measure one package against named peers, installed beside it in an environment of its own."""
    folder = ROOT / f"packages/zgcm-{package}/benchmarks"
    install(session, *TEST_TOOLS, "pytest-benchmark", *source(*PACKAGES))
    session.install("--no-compile", "-c", str(CONSTRAINTS), "-r", str(folder / "requirements.txt"))
    pytest(session, str(folder), "-s")


@nox.session
def clean(session: nox.Session) -> None:
    """Remove what the other sessions left in the clone, environments excepted."""
    for name in ("demo", ".nox/scratch", ".ruff_cache", ".mypy_cache", ".pytest_cache"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    session.log(f"cleaned {ROOT}, environments are kept in {os.environ.get('NOXENVDIR', '.nox')}")
