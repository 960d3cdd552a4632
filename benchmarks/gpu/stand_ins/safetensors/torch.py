"""The part of the real package that writes files."""

from safetensors import safe_open as save_file

__all__ = ["save_file"]
