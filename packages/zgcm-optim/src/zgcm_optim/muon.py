"""Muon for matrices and Adam for the rest, in one optimizer.

With gradient G, momentum M, weight W of [out, in], learning rate η, decay λ and momentum factor μ:

    M <- μ M + (1 - μ) G                       exponential average
    U  = (1 - μ) G + μ M  with Nesterov, else M
    W <- (1 - η λ) W                           decoupled decay, before the update
    W <- W - η · scale(out, in) · extra · orthogonalize(U)

A parameter group with ``algorithm="adam"`` gets Adam with decoupled decay at the same learning rate. Sharded
parameters (DTensor) give the same numbers as unsharded ones; see ``distribution``.

Source: published ZGCM-1 training setup; K. Jordan et al., Muon, 2024.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from zgcm_optim import adam, settings
from zgcm_optim.blocks import check_blocks
from zgcm_optim.coefficients import Coefficients
from zgcm_optim.distribution import Distribution, Handling, shared, update_shared
from zgcm_optim.exchange import Shared
from zgcm_optim.layout import align_gradient, local
from zgcm_optim.state import check_state, regroup
from zgcm_optim.update import Matrix, Rule, update_whole

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class Muon(Optimizer):
    """One optimizer for a whole model: Muon for matrices, Adam for the rest.

    Every argument but ``params`` is a default that a parameter group may override. A group may also say
    ``algorithm`` (``"muon"``, the default, or ``"adam"``), ``blocks`` and ``block_dim`` (see ``blocks``).

    Args:
        params: parameters, named parameters or groups; ``route_parameters(model)`` makes them.
        lr: learning rate of both algorithms; 0 is allowed and leaves the weights as they are.
        momentum: factor of the exponential average, in [0, 1).
        nesterov: mix the gradient into the average once more.
        weight_decay: decoupled decay; the weights shrink by lr * weight_decay, whatever the scale.
        steps: iterations of the orthogonalization.
        coefficients: name of a table in ``coefficients.TABLES``, or one triple per step.
        scale: mode of ``update_scale``.
        extra_scale: another factor of the update.
        betas: Adam's averages.
        eps: Adam's epsilon.
        sharded: for DTensor parameters; ``"exact"`` gives the update of the unsharded matrix, ``"blockwise"``
            orthogonalizes and scales each tensor-parallel shard alone, exact over the other axes.
        dtype: dtype of the orthogonalization: bfloat16, float32 or float64.
        method: ``"auto"``, ``"standard"`` or ``"gram"``; see ``orthogonalize``.
        tensor_axes: names of the mesh axes that are tensor-parallel.
        tensor_parallel: for ``sharded="exact"``, how a matrix is handled whose long side is cut over one of
            ``tensor_axes``: ``"gather"`` to one owner, ``"gram"`` iterates on the Gram matrix on all ranks after
            one all-reduce, ``"auto"`` takes what ``costs.choose_tensor_parallel`` says. Others are gathered.

    Raises:
        ValueError: an invalid value, or a Muon parameter that is not a matrix.

    Source: published ZGCM-1 training setup.
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        steps: int = 5,
        coefficients: Coefficients = "quintic",
        scale: str = "spectral",
        extra_scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        sharded: str = "exact",
        dtype: torch.dtype = torch.bfloat16,
        method: str = "auto",
        tensor_axes: Sequence[str] = ("tp",),
        tensor_parallel: str = "auto",
    ) -> None:
        """Check the settings and create the state of every parameter, all zeros."""
        self._distribution = Distribution()
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "steps": steps,
            "coefficients": coefficients,
            "dtype": dtype,
            "method": method,
            "scale": scale,
            "extra_scale": extra_scale,
            "betas": betas,
            "eps": eps,
            "sharded": sharded,
            "tensor_axes": tuple(tensor_axes),
            "tensor_parallel": tensor_parallel,
            "algorithm": "muon",
            "blocks": None,
            "block_dim": 0,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and create the state of its parameters.

        Args:
            param_group: ``params`` and whatever differs from the defaults.

        Raises:
            ValueError: an invalid value; the optimizer is left as it was.
        """
        super().add_param_group(param_group)
        try:
            settings.check_group(self.param_groups[-1])
            self._check_blocks(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise
        self._create_state(self.param_groups[-1])

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss and the gradients anew, or None.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        whole: list[Matrix] = []
        parts: list[Shared] = []
        for group in self.param_groups:
            ready = [align_gradient(parameter) for parameter in group["params"] if parameter.grad is not None]
            if group["algorithm"] == "adam":
                adam.update(ready, self.state, group)
                continue
            rule, handling = Rule.of(group, settings.iteration(group)), Handling.of(group)
            for parameter in ready:
                part = self._matrix(parameter, rule)
                spread = self._distribution.of(parameter, handling, rule)
                if spread is None:
                    whole.append(part)
                else:
                    parts.append(shared(part, spread))
        update_shared(parts)
        update_whole(whole)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, by parameter name where both sides have names.

        Learning rates and decays come from the state, as in every torch optimizer. Parameters that the state
        says nothing about had no update yet and start from zeros.

        Args:
            state_dict: what ``state_dict`` returned, perhaps of an optimizer with other groups.

        Raises:
            ValueError: names or entries that do not belong to these parameters, or a torn state.
        """
        rearranged = regroup(state_dict, self.param_groups)
        check_state(rearranged)
        super().load_state_dict({**rearranged, "param_groups": self._settings(rearranged["param_groups"])})
        for group in self.param_groups:
            self._create_state(group)

    def _settings(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Check saved groups; settings that they do not know (they may be older) keep their present values."""
        if len(saved) != len(self.param_groups):
            return saved
        groups = [{**group, **new} for group, new in zip(self.param_groups, saved, strict=True)]
        for group, new in zip(self.param_groups, groups, strict=True):
            settings.check_group({**new, "params": group["params"]})
        return groups

    def _create_state(self, group: Mapping[str, Any]) -> None:
        for parameter in group["params"]:
            state = self.state[parameter]
            if state:
                continue
            if group["algorithm"] == "adam":
                state.update(adam.initial_state(parameter))
            else:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def _check_blocks(self, group: Mapping[str, Any]) -> None:
        """Check blocks against the matrix that is orthogonalized, which may be a shard of the parameter."""
        rule, handling = Rule.of(group, settings.iteration(group)), Handling.of(group)
        for parameter in group["params"] if group["algorithm"] == "muon" else ():
            spread = self._distribution.of(parameter, handling, rule)
            shape = local(parameter).shape if spread is None else spread.matrix
            check_blocks(group["blocks"], group["block_dim"], shape)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle; process groups are found again when they are needed."""
        super().__setstate__(state)
        self.__dict__.setdefault("_distribution", Distribution())

    def _matrix(self, parameter: Tensor, rule: Rule) -> Matrix:
        gradient, momentum = parameter.grad, self.state[parameter]["momentum_buffer"]
        assert gradient is not None
        return Matrix(local(parameter), local(gradient), local(momentum), rule)
