"""Load rows as batches, in order, and never lose the place.

``Loader`` is what training uses. ``batch`` holds what it yields, ``options`` how it does so, ``fields``
turns rows into masks and counts, ``python`` and ``dali`` are the two ways to read, with identical output.
"""

from zgcm_data.loader.batch import Batch
from zgcm_data.loader.loader import Loader
from zgcm_data.loader.options import LoaderOptions, RowSource

__all__ = ["Batch", "Loader", "LoaderOptions", "RowSource"]
