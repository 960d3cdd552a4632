"""Muon for matrices and Adam for the rest, in one optimizer that is exact under any sharding.

from zgcm_optim import Muon, clip_grad_norm_, route_parameters, schedule

optimizer = Muon(route_parameters(model), lr=2e-4)
clip_grad_norm_(model.parameters(), 1.0)
for group in optimizer.param_groups:
    group["lr"] = schedule.constant(update, peak=2e-4, warmup=100)
optimizer.step()
"""

from zgcm_optim import presets, schedule
from zgcm_optim._version import __version__
from zgcm_optim.clipping import clip_grad_norm_
from zgcm_optim.coefficients import TABLES, CoefficientTable, update_scale
from zgcm_optim.muon import Muon
from zgcm_optim.orthogonalize import orthogonalize
from zgcm_optim.products import count_operations
from zgcm_optim.routing import describe_routing, route_parameters

__all__ = [
    "TABLES",
    "CoefficientTable",
    "Muon",
    "__version__",
    "clip_grad_norm_",
    "count_operations",
    "describe_routing",
    "orthogonalize",
    "presets",
    "route_parameters",
    "schedule",
    "update_scale",
]
