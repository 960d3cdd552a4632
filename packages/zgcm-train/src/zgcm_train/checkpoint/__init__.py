"""Checkpoints that are either whole or passed over.

A checkpoint is a folder ``step-000001000`` that holds a PyTorch distributed checkpoint, ``state.json`` (where the
run stands) and ``COMPLETE``, written last, with the size and SHA-256 of every other file. It is written under a
temporary name and renamed, so a folder without a valid ``COMPLETE`` is torn and never loaded.
"""

from zgcm_train.checkpoint.folder import Checkpoint, checkpoints, newest_complete, prune, verify_checkpoint
from zgcm_train.checkpoint.progress import Progress
from zgcm_train.checkpoint.saver import Saver
from zgcm_train.checkpoint.tensors import load_checkpoint, save_checkpoint

__all__ = [
    "Checkpoint",
    "Progress",
    "Saver",
    "checkpoints",
    "load_checkpoint",
    "newest_complete",
    "prune",
    "save_checkpoint",
    "verify_checkpoint",
]
