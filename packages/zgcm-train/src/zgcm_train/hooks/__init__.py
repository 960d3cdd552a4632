"""What watches a run: metrics, ledger, checkpoints, evaluation, signals, numerics, traces, hangs."""

from zgcm_train.hooks.checkpoints import CheckpointHook
from zgcm_train.hooks.evaluation import EvaluationHook
from zgcm_train.hooks.ledger import LedgerHook
from zgcm_train.hooks.metrics import MetricsHook
from zgcm_train.hooks.numerics import NumericsHook
from zgcm_train.hooks.profiler import ProfilerHook
from zgcm_train.hooks.stop import StopHook
from zgcm_train.hooks.wandb import WandbHook
from zgcm_train.hooks.watchdog import WatchdogHook

__all__ = [
    "CheckpointHook",
    "EvaluationHook",
    "LedgerHook",
    "MetricsHook",
    "NumericsHook",
    "ProfilerHook",
    "StopHook",
    "WandbHook",
    "WatchdogHook",
]
