"""Tensor and context parallelism, applied to a decoder from outside and in place."""

from zgcm_model.parallel.context import apply_context_parallel, shard_sequence
from zgcm_model.parallel.tensor import apply_tensor_parallel
from zgcm_model.parallel.vocabulary import VocabularyShard, vocabulary_parallel_lm_terms

__all__ = [
    "VocabularyShard",
    "apply_context_parallel",
    "apply_tensor_parallel",
    "shard_sequence",
    "vocabulary_parallel_lm_terms",
]
