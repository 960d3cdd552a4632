"""Exact and near deduplication, and exclusion of what another set already holds."""

from zgcm_data.dedup.clusters import connected_components
from zgcm_data.dedup.decide import decide_duplicates
from zgcm_data.dedup.exclude import exclude
from zgcm_data.dedup.signatures import signature_frame

__all__ = ["connected_components", "decide_duplicates", "exclude", "signature_frame"]
