"""Ordered, deduplicated, accounted training data: from raw text to shards that never lose their place.

What is imported here reads, packs, stores and loads rows with numpy and torch alone. Preparing text (clean,
deduplicate, order, tokenize) lives in its own modules and needs the extra ``zgcm-data[prepare]``.
"""

from zgcm_data._version import __version__
from zgcm_data.dataset import Dataset, open_dataset
from zgcm_data.ledger import Ledger, read_ledger
from zgcm_data.loader import Batch, Loader, LoaderOptions
from zgcm_data.megatron_facts import DatasetFacts
from zgcm_data.megatron_rows import IndexedRows, open_indexed
from zgcm_data.order import BatchPlan, RowOrder, row_in_stage
from zgcm_data.packing import PackingStats, best_fit, concatenate
from zgcm_data.rows import Row, TokenizedDocument
from zgcm_data.shards import (
    Manifest,
    ManifestHeader,
    OrderInfo,
    Problem,
    ShardError,
    ShardSet,
    SourceInfo,
    load_manifest,
    open_shards,
    verify_shards,
    write_shards,
)

__all__ = [
    "Batch",
    "BatchPlan",
    "Dataset",
    "DatasetFacts",
    "IndexedRows",
    "Ledger",
    "Loader",
    "LoaderOptions",
    "Manifest",
    "ManifestHeader",
    "OrderInfo",
    "PackingStats",
    "Problem",
    "Row",
    "RowOrder",
    "ShardError",
    "ShardSet",
    "SourceInfo",
    "TokenizedDocument",
    "__version__",
    "best_fit",
    "concatenate",
    "load_manifest",
    "open_dataset",
    "open_indexed",
    "open_shards",
    "read_ledger",
    "row_in_stage",
    "verify_shards",
    "write_shards",
]
