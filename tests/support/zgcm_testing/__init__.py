"""Helpers of the workshop's tests; never released."""

from zgcm_testing.ranks import assert_sharded_equal, run_ranks

__all__ = ["assert_sharded_equal", "run_ranks"]
