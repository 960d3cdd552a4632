"""The whole line in five minutes: text, shards, two stages, evaluation, report."""

from zgcm_train.demo.demo import DemoSummary, run_demo

__all__ = ["DemoSummary", "run_demo"]
