"""The shard set on disk: plain WebDataset shards, a DALI index beside each, and one manifest.

``write`` makes a set, ``read`` opens it for random access, ``verify`` checks every byte of it, ``manifest``
and ``index`` are the two small files that say what it holds, ``tar`` knows the layout of a member, ``foreign``
reads rows that another program wrote as WebDataset.
"""

from zgcm_data.shards.foreign import read_webdataset
from zgcm_data.shards.manifest import (
    Manifest,
    ManifestHeader,
    OrderInfo,
    ShardError,
    ShardInfo,
    SourceInfo,
    load_manifest,
)
from zgcm_data.shards.read import ShardSet, open_shards
from zgcm_data.shards.verify import Problem, inspect, verify_shards
from zgcm_data.shards.write import write_shards

__all__ = [
    "Manifest",
    "ManifestHeader",
    "OrderInfo",
    "Problem",
    "ShardError",
    "ShardInfo",
    "ShardSet",
    "SourceInfo",
    "inspect",
    "load_manifest",
    "open_shards",
    "read_webdataset",
    "verify_shards",
    "write_shards",
]
