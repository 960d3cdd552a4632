"""P4: everything imports and every command explains itself where a heavy part is missing or broken.

A broken part is worse than a missing one: a library built for a GPU raises OSError on a machine without the
driver. One process runs all of it, because importing torch is what takes the time.
"""

import json
import os
import subprocess
import sys

import pytest

BROKEN = ("transformer_engine", "nvidia", "flash_attn", "ray", "lm_eval", "wandb", "transformers")
ABSENT = ("daft", "pyarrow", "tokenizers", "webdataset")
COMMANDS = ("zgcm_data", "zgcm_eval", "zgcm_train")
FEATURES = {
    "zgcm-eval[harness]": "from zgcm_eval.adapters.lm_eval import harness_model; harness_model(None)",
    "zgcm-eval[huggingface]": "from zgcm_eval.adapters.huggingface import load_huggingface as f; f('.')",
    "zgcm-data[dali]": "from zgcm_data.loader import dali; dali.require()",
    "zgcm-data[prepare]": "from zgcm_data import engine; engine.daft()",
}

PROBE = """
import contextlib, importlib, io, json, pkgutil, sys
found = {"imports": {}, "commands": {}, "features": {}}
commands, features = json.loads(sys.argv[1])

def outcome(function):
    try:
        return function()
    except (Exception, SystemExit) as error:
        code = getattr(error, "code", None)
        return code if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"

for package in ("zgcm_optim", "zgcm_model", "zgcm_data", "zgcm_eval", "zgcm_train"):
    root = importlib.import_module(package)
    names = [m.name for m in pkgutil.walk_packages(root.__path__, package + ".") if "__main__" not in m.name]
    for name in names:
        found["imports"][name] = outcome(lambda: importlib.import_module(name) and None)
for command in commands:
    for option in ("--help", "--version"):
        sys.argv = [command, option]
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            code = outcome(lambda: importlib.import_module(command + ".cli").main())
        found["commands"][command + " " + option] = [code, len(shown.getvalue())]
for extra, code in features.items():
    found["features"][extra] = outcome(lambda: exec(code, {}))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What happened in a process where some heavy parts raise OSError and others are not there."""
    folder = tmp_path_factory.mktemp("parts")
    for name in BROKEN:
        (folder / f"{name}.py").write_text(f"raise OSError('{name} needs a driver that is not here')\n")
    for name in ABSENT:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}')\n")
    environment = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROBE, json.dumps([COMMANDS, FEATURES])]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().split("\n")[-1])


def test_p4_every_module_imports_without_the_heavy_parts(found):
    assert len(found["imports"]) > 150
    failed = {name: error for name, error in found["imports"].items() if error is not None}
    assert failed == {}


@pytest.mark.parametrize("command", COMMANDS)
def test_p4_help_and_version_work_without_the_heavy_parts(found, command):
    for option in ("--help", "--version"):
        code, shown = found["commands"][f"{command} {option}"]
        assert code in (0, None)
        assert shown > 5


@pytest.mark.parametrize("extra", FEATURES)
def test_p4_asking_for_a_missing_part_names_the_extra(found, extra):
    error = found["features"][extra]
    assert error.startswith("ImportError: ")
    assert f'pip install "{extra}"' in error
