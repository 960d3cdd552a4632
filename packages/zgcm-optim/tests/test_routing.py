"""Routing by role: nothing depends on names or on aspect ratios."""

import pytest
import torch
from torch import nn

from zgcm_optim import Muon, describe_routing, presets, route_parameters


class Block(nn.Module):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.add_module(prefix + "a", nn.Linear(8, 24))
        self.add_module(prefix + "b", nn.Linear(24, 8, bias=False))
        self.add_module(prefix + "n", nn.LayerNorm(8))
        self.add_module(prefix + "gate", nn.Linear(8, 1, bias=False))


class Model(nn.Module):
    """A model whose names are chosen by the test."""

    def __init__(
        self, names: tuple[str, str, str] = ("embed", "body", "lm_head"), tied: bool = False
    ) -> None:
        super().__init__()
        embed, body, head = names
        self.add_module(embed, nn.Embedding(40, 8))
        self.add_module(body, nn.ModuleList([Block("x"), Block("embed")]))
        self.add_module(head, nn.Linear(8, 40, bias=False))
        self.conv = nn.Conv1d(4, 4, 3)
        if tied:
            self.get_submodule(head).weight = self.get_submodule(embed).weight


def by_algorithm(model: nn.Module) -> dict[str, set[int]]:
    result: dict[str, set[int]] = {"muon": set(), "adam": set()}
    for group in route_parameters(model):
        result[group["algorithm"]] |= {id(parameter) for _, parameter in group["params"]}
    return result


@pytest.mark.parametrize(
    "names", [("embed", "body", "lm_head"), ("q_proj", "lm_head", "dense"), ("w", "embed", "v")]
)
@pytest.mark.parametrize("tied", [False, True])
def test_o6_roles_decide_and_every_parameter_is_in_one_group(names: tuple[str, str, str], tied: bool) -> None:
    model = Model(names, tied)
    routed = by_algorithm(model)
    embed, body, head = (model.get_submodule(name) for name in names)
    assert {id(embed.weight), id(head.weight)} <= routed["adam"]
    hidden = {id(m.weight) for m in body.modules() if isinstance(m, nn.Linear) and m.out_features > 1}
    assert routed["muon"] == hidden
    assert not routed["muon"] & routed["adam"]
    total = sum(p.numel() for g in route_parameters(model) for _, p in g["params"])
    assert total == sum(p.numel() for p in model.parameters())


def test_o6_degenerate_and_wide_matrices() -> None:
    model = nn.ModuleList(
        [nn.Linear(300, 2, bias=False), nn.Linear(300, 1, bias=False), nn.Linear(1, 9, bias=False)]
    )
    routed = by_algorithm(model)
    assert routed["muon"] == {id(model[0].weight)}
    assert routed["adam"] == {id(model[1].weight), id(model[2].weight)}


def test_o6_flattened_weights_never_reach_muon() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(torch.zeros(16))
    assert by_algorithm(model)["muon"] == set()


def test_frozen_parameters_are_left_out() -> None:
    model = Model()
    model.conv.requires_grad_(False)
    names = {name for group in route_parameters(model) for name, _ in group["params"]}
    assert not any(name.startswith("conv") for name in names)
    with pytest.raises(ValueError, match="trainable"):
        route_parameters(model.requires_grad_(False))


def test_named_heads_switch_the_comparison_of_widths_off() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(24, 8)
            self.hidden = nn.Linear(8, 24, bias=False)
            self.final = nn.Linear(8, 12, bias=False)
            self.output_head_modules = [self.final]

    model = Named()
    routed = by_algorithm(model)
    assert routed["muon"] == {id(model.hidden.weight)}
    del model.output_head_modules
    assert id(model.hidden.weight) in by_algorithm(model)["adam"]
    model.get_output_embeddings = lambda: model.final
    assert by_algorithm(model)["muon"] == {id(model.hidden.weight)}


def test_decay_of_each_role() -> None:
    for group in route_parameters(Model(), weight_decay=0.3):
        vectors = all(parameter.ndim < 2 for _, parameter in group["params"])
        assert group["weight_decay"] == (0.0 if vectors else 0.3)
    assert all(
        group["weight_decay"] == 0.3
        for group in route_parameters(Model(), weight_decay=0.3, decay_vectors=True)
    )


def test_description_names_every_parameter() -> None:
    model = Model()
    text = describe_routing(route_parameters(model))
    assert all(name in text for name, _ in model.named_parameters())
    optimizer = Muon(route_parameters(model), 0.1)
    lines = describe_routing(optimizer.param_groups).splitlines()
    assert lines[0].split() == ["algorithm", "shape", "decay", "parameter"]
    assert len(lines) == 1 + len(list(model.parameters()))
    assert "#0" in describe_routing([{"params": [torch.zeros(2, 2)]}])


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (
            "zgcm1",
            {"lr": 2e-4, "momentum": 0.9, "nesterov": False, "coefficients": "quintic", "scale": "spectral"},
        ),
        (
            "zgcm1",
            {"steps": 5, "sharded": "blockwise", "extra_scale": 1.0, "betas": (0.9, 0.95), "eps": 1e-8},
        ),
        ("deepseek_v4", {"momentum": 0.95, "nesterov": True, "steps": 10, "extra_scale": 0.18, "eps": 1e-20}),
        (
            "moonlight",
            {"momentum": 0.95, "nesterov": True, "scale": "match_rms_adamw", "coefficients": "simple"},
        ),
    ],
)
def test_presets(preset: str, expected: dict[str, object]) -> None:
    optimizer = getattr(presets, preset)(Model())
    for group in optimizer.param_groups:
        assert {key: group[key] for key in expected} == expected
        vectors = preset != "deepseek_v4" and all(p.ndim < 2 for p in group["params"])
        assert group["weight_decay"] == (0.0 if vectors else 0.1)
    assert getattr(presets, preset)(Model(), momentum=0.5).param_groups[0]["momentum"] == 0.5
