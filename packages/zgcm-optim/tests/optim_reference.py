"""The update in float64, written from the equations and sharing no code with the package."""

import math

import torch
from torch import Tensor

QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
SIMPLE = [(3.4445, -4.7750, 2.0315)] * 5


def orthogonal(matrix: Tensor, triples: list[tuple[float, float, float]] = QUINTIC) -> Tensor:
    """Apply the polynomial to the singular values of a matrix found by a full decomposition."""
    u, s, vt = torch.linalg.svd(matrix.detach().double(), full_matrices=False)
    norm = math.sqrt(float((s**2).sum()))
    s = s / norm if norm > 0 else s
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


def muon_step(weight: Tensor, gradient: Tensor, average: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    """Return weight and average after one update, in float64."""
    lr, decay, mu = options["lr"], options["weight_decay"], options["momentum"]
    average = mu * average + (1 - mu) * gradient
    mixed = (1 - mu) * gradient + mu * average if options["nesterov"] else average
    out, in_ = weight.shape
    update = math.sqrt(max(out, in_)) * orthogonal(mixed, options.get("triples", QUINTIC))
    return weight * (1 - lr * decay) - lr * update, average


def adam_step(weight: Tensor, gradient: Tensor, state: dict, options: dict) -> Tensor:
    """Return the weight after one update of decoupled Adam, in float64; the state is advanced."""
    (beta1, beta2), lr = options["betas"], options["lr"]
    state["t"] = state.get("t", 0) + 1
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * gradient
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * gradient**2
    mean = state["m"] / (1 - beta1 ** state["t"])
    root = (state["v"] / (1 - beta2 ** state["t"])).sqrt()
    return weight * (1 - lr * options["weight_decay"]) - lr * mean / (root + options["eps"])
