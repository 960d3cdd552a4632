"""Make this clone's packages importable on a machine that has torch and nothing else."""

import sys
from pathlib import Path

GPU_FOLDER = Path(__file__).resolve().parents[1]
ROOT = GPU_FOLDER.parents[1]


def use_this_clone() -> None:
    """Put the sources of zgcm-model and zgcm-optim in front, and the stand-ins behind everything installed."""
    for package in ("zgcm-optim", "zgcm-model"):
        sys.path.insert(0, str(ROOT / "packages" / package / "src"))
    sys.path.append(str(GPU_FOLDER / "stand_ins"))
