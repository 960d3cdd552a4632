"""Plan, run, verify and resume the pretraining of ZGCM-1, from raw text to an evaluated model."""

from zgcm_train._version import __version__

__all__ = ["__version__"]
