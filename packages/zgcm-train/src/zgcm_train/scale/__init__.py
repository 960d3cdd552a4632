"""A run at full scale without its machines: one rank's shapes, memory and traffic, measured on one process.

``measure_rank`` assembles a recipe as its process would, under PyTorch's fake process group and with fake tensors,
which have shapes but no storage, and makes one real update with the trainer's own code. Nothing is estimated from a
formula that could drift from the code; what is left out is said in ``rank``.
"""

from zgcm_train.scale.measure import MemoryUse, RankMeasure, Traffic
from zgcm_train.scale.rank import measure_rank
from zgcm_train.scale.ranks import measure_ranks, sample_ranks
from zgcm_train.scale.traffic import Collective, count_collectives

__all__ = [
    "Collective",
    "MemoryUse",
    "RankMeasure",
    "Traffic",
    "count_collectives",
    "measure_rank",
    "measure_ranks",
    "sample_ranks",
]
