"""The README's example runs, and the public names are those that are documented."""

import re
from pathlib import Path

import zgcm_optim

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_learns() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        scope: dict = {}
        exec(compile(block, str(README), "exec"), scope)
        assert scope["loss"].item() < 3.9


def test_public_names() -> None:
    assert sorted(zgcm_optim.__all__) == [
        "CoefficientTable",
        "Muon",
        "TABLES",
        "__version__",
        "clip_grad_norm_",
        "count_operations",
        "describe_routing",
        "orthogonalize",
        "presets",
        "route_parameters",
        "schedule",
        "update_scale",
    ]
    assert all(hasattr(zgcm_optim, name) for name in zgcm_optim.__all__)
