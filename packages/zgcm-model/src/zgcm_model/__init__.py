"""The ZGCM-1 decoder: gated sliding-window attention with a global layer every sixth, linear in length."""

from zgcm_model._version import __version__

__all__ = ["__version__"]
