"""State survives saving, another grouping and a resume."""

import copy
import io

import pytest
import torch
from optim_reference import QUINTIC
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from zgcm_optim import Muon, route_parameters, schedule


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 11))


def train(model: nn.Module, optimizer: Muon, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def saved(optimizer: Muon) -> dict:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def regrouped(model: nn.Module) -> list[dict]:
    """Every parameter in a group of its own, in reverse order."""
    groups = []
    for group in reversed(route_parameters(model)):
        rest = {key: value for key, value in group.items() if key != "params"}
        groups += [{**rest, "params": [pair]} for pair in reversed(group["params"])]
    return groups


@pytest.mark.parametrize("grouping", [route_parameters, regrouped])
def test_o18_resume_equals_no_interruption_whatever_the_grouping(grouping) -> None:
    straight = build()
    optimizer = Muon(route_parameters(straight), 0.02)
    train(straight, optimizer, range(3))
    half, state = copy.deepcopy(straight), saved(optimizer)
    train(straight, optimizer, range(3, 6))

    resumed = Muon(grouping(half), 0.02)
    resumed.load_state_dict(state)
    train(half, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(half), strict=True))
    back = Muon(route_parameters(half), 0.02)
    back.load_state_dict(saved(resumed))
    torch.testing.assert_close(back.state_dict()["state"], _by_position(saved(resumed), back))


def _by_position(state: dict, optimizer: Muon) -> dict:
    place = {
        name: key
        for group in state["param_groups"]
        for name, key in zip(group["param_names"], group["params"])
    }
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    return {index: state["state"][place[name]] for index, name in enumerate(names)}


def test_o18_another_model_or_merged_settings_are_clear_errors() -> None:
    model = build()
    state = Muon(route_parameters(model), 0.02).state_dict()
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="missing"):
        Muon(route_parameters(other), 0.02).load_state_dict(state)
    vectors_and_tables = [
        {
            "params": [pair for group in route_parameters(model)[1:] for pair in group["params"]],
            "algorithm": "adam",
        },
        route_parameters(model)[0],
    ]
    with pytest.raises(ValueError, match="weight_decay"):
        Muon(vectors_and_tables, 0.02).load_state_dict(state)


def test_o18_without_names_the_order_decides_and_a_mismatch_is_refused() -> None:
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4, 3))]
    state = Muon(params, 0.1).state_dict()
    Muon(params, 0.2).load_state_dict(state)
    with pytest.raises(ValueError, match="parameter group"):
        Muon([{"params": [p]} for p in params], 0.1).load_state_dict(state)


@pytest.mark.parametrize("restore", ["load", "distributed checkpoint", "neither"])
def test_o13_no_fake_step_shifts_the_bias_correction(restore: str) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    model = nn.ParameterList([parameter])
    optimizer = Muon([{"params": [("0", parameter)], "algorithm": "adam", "weight_decay": 0.0}], 0.1)
    if restore == "load":
        optimizer.load_state_dict(optimizer.state_dict())
    elif restore == "distributed checkpoint":
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    parameter.grad = torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((4,), -0.1))
    state = optimizer.state[parameter]
    assert state["step"].item() == 1
    torch.testing.assert_close(state["exp_avg"], torch.full((4,), 0.1))
    torch.testing.assert_close(state["exp_avg_sq"], torch.full((4,), 0.05))


def test_o14_state_is_complete_before_the_first_gradient() -> None:
    model = build()
    optimizer = Muon(route_parameters(model), 0.02)
    frozen = next(iter(model.parameters()))
    train(model, optimizer, range(1))
    fresh = Muon(route_parameters(build()), 0.02)
    assert fresh.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    frozen.grad = None
    optimizer.step()
    resumed = Muon(route_parameters(model), 0.02)
    resumed.load_state_dict(saved(optimizer))
    assert resumed.state[frozen]["step"].item() == 1


def test_o14_a_lazily_saved_state_resumes_and_a_torn_one_is_an_error() -> None:
    model = build()
    optimizer = Muon(route_parameters(model), 0.02)
    state = saved(optimizer)
    lazy = {**state, "state": {key: value for key, value in state["state"].items() if key % 2}}
    Muon(route_parameters(model), 0.02).load_state_dict(lazy)
    train(model, optimizer, range(1))
    adam = next(key for key, value in state["state"].items() if "exp_avg" in value)
    del state["state"][adam]["exp_avg_sq"]
    with pytest.raises(ValueError, match="torn"):
        optimizer.load_state_dict(state)


def test_o15_rates_come_from_the_state_after_a_resume() -> None:
    def rate(step: int) -> float:
        return schedule.cosine(step, peak=0.1, warmup=10, total=200)

    def run(optimizer: Muon, steps: range) -> list[tuple[float, float]]:
        used = []
        for step in steps:
            used.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))
            parameter.grad = torch.ones(3, 3)
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = rate(step + 1), 0.01 * step
        return used

    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = Muon([parameter], rate(1), weight_decay=0.0)
    run(optimizer, range(1, 99))
    state, kept = saved(optimizer), parameter.detach().clone()
    straight, end = run(optimizer, range(99, 102)), parameter.detach().clone()
    parameter.data.copy_(kept)
    resumed = Muon([parameter], 123.0, weight_decay=9.0)
    resumed.load_state_dict(state)
    assert run(resumed, range(99, 102)) == straight
    assert torch.equal(parameter.detach(), end)


def test_the_algorithm_may_not_change_under_a_state() -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    state = Muon([("w", parameter)], 0.1).state_dict()
    state["param_groups"][0]["algorithm"] = "adam"
    with pytest.raises(ValueError, match="algorithm"):
        Muon([("w", parameter)], 0.1).load_state_dict(state)


def test_loaded_settings_are_checked() -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = Muon([parameter], 0.1, coefficients=QUINTIC)
    state = saved(optimizer)
    optimizer.load_state_dict(state)
    state["param_groups"][0]["momentum"] = 7.0
    with pytest.raises(ValueError, match="momentum"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["momentum"] == 0.95
    del state["param_groups"][0]["momentum"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["momentum"] == 0.95
    state["param_groups"].append({**state["param_groups"][0], "params": []})
    with pytest.raises(ValueError, match="number of parameter groups"):
        optimizer.load_state_dict(state)
