"""Muon for matrices and Adam for the rest, in one optimizer that is exact under any sharding."""

from zgcm_optim._version import __version__

__all__ = ["__version__"]
