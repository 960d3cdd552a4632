"""Pipeline stages: how layers are cut, what a stage holds, what is refused, and the non-finite update."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zgcm_model import Decoder, ModelConfig, initialize
from zgcm_optim import route_parameters
from zgcm_testing import run_ranks
from zgcm_testing.layouts import TOY, toy_recipe, updates, whole
from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import Recipe
from zgcm_train.assembly import build_parts
from zgcm_train.errors import ConfigurationError
from zgcm_train.gathered import GatheredDecoder
from zgcm_train.mesh import refuse_misfit
from zgcm_train.pipeline import DecoderStage, Place, layer_spans
from zgcm_train.step import train_step


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"), [(32, 2, [16, 16]), (7, 3, [3, 2, 2]), (3, 3, [1, 1, 1]), (5, 1, [5])]
)
def test_spans_are_consecutive_and_the_last_is_never_longer(
    layers: int, stages: int, sizes: list[int]
) -> None:
    spans = layer_spans(layers, stages)
    assert [len(span) for span in spans] == sizes
    assert [layer for span in spans for layer in span] == list(range(layers))


def stages_of(config: ModelConfig, count: int) -> list[DecoderStage]:
    with torch.device("meta"):
        return [DecoderStage(Decoder(config), Place(index, count)) for index in range(count)]


def test_stages_hold_every_weight_once_under_its_global_name() -> None:
    with torch.device("meta"):
        expected = [name for name, _ in Decoder(TOY).named_parameters()]
    names = [name for stage in stages_of(TOY, 3) for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(expected)
    assert {"embed_tokens.weight", "layers.0.attention.q_proj.weight"} < set(names)


def test_initial_weights_of_stages_are_those_of_the_whole() -> None:
    reference = dict(initialize(Decoder(TOY), 5).named_parameters())
    for stage in stages_of(TOY, 3):
        initialize(stage.to_empty(device="cpu"), 5)
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, reference[name]), name


def test_routing_is_that_of_the_whole_even_where_a_layer_is_as_wide_as_the_vocabulary() -> None:
    config = ModelConfig(32, 16, 32, 3, 4, 4, 8, window=5, global_every=2, max_positions=64)

    def algorithms(model: Decoder) -> dict[str, Any]:
        return {name: group["algorithm"] for group in route_parameters(model) for name, _ in group["params"]}

    with torch.device("meta"):
        expected = algorithms(Decoder(config))
    assert expected["layers.0.feed_forward.up_proj.weight"] == "muon"
    joined: dict[str, Any] = {}
    for stage in stages_of(config, 3):
        joined |= algorithms(stage)
    assert joined == expected


@pytest.mark.parametrize(
    ("parallel", "changes", "message"),
    [
        ({"pp": 8}, {}, r"parallel\.pp 8 has more stages than the model's 6 layers; use at most 6"),
        (
            {"pp": 3},
            {"data": {"micro_batch": 4}},
            r"parallel\.pp 3 needs at least 3 micro-batches per update and has 2; lower data\.micro_batch",
        ),
        ({"pp": 2, "gradient_sync": "every"}, {}, r'set it to "last" or parallel\.pp to 1'),
    ],
)
def test_misfits_are_refused_with_the_remedy(
    data: Path, parallel: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    recipe = tiny_recipe(data, parallel=parallel, **({"data": {"micro_batch": 1}} | changes))
    with pytest.raises(ConfigurationError, match=message):
        refuse_misfit(recipe, recipe.parallel.devices)


def test_a_cache_is_refused() -> None:
    stage = stages_of(TOY, 3)[0].to_empty(device="cpu")
    with pytest.raises(ValueError, match="generate on an unsharded decoder"):
        stage(torch.zeros(1, 4, dtype=torch.int64), cache=object())


def poison_one_stage(rank: int, world: int, recipe: Recipe) -> list[tuple[bool, bool, bool]]:
    """Make a gradient of one stage not finite; return for each stage whether it updated and changed."""
    parts = build_parts(recipe, Path("unused"), None)
    seen = []
    for poisoned, batches in zip((0, 1, None), updates(parts), strict=False):
        before = whole(parts.decoder)
        first = next(parts.decoder.parameters())
        handle = first.register_hook(lambda g: g * torch.inf) if rank == poisoned else None
        result = train_step(parts.decoder, parts.optimizer, batches, parts.settings)
        if handle is not None:
            handle.remove()
        after = whole(parts.decoder)
        moments = [s["momentum_buffer"] for s in parts.optimizer.state.values() if "momentum_buffer" in s]
        changed = any(not torch.equal(before[name], after[name]) for name in before)
        seen.append((result.applied, changed, all(bool(m.isfinite().all()) for m in moments)))
    return seen


def test_t6_an_update_that_is_not_finite_on_one_stage_is_left_out_on_all(data: Path) -> None:
    recipe = toy_recipe(data, {"pp": 2}, isolated=True)
    skipped, made = (False, False, True), (True, True, True)
    assert run_ranks(poison_one_stage, 2, recipe) == [[skipped, skipped, made]] * 2


def norms_of_stages(rank: int, world: int, recipe: Recipe) -> tuple[float, float]:
    parts = build_parts(recipe, Path("unused"), None)
    result = train_step(parts.decoder, parts.optimizer, next(updates(parts)), parts.settings)
    return result.grad_norm, result.loss_sum


def test_every_stage_reports_the_norm_and_the_loss_of_the_whole(data: Path) -> None:
    alone = run_ranks(norms_of_stages, 1, toy_recipe(data, {}, isolated=True))[0]
    for got in run_ranks(norms_of_stages, 2, toy_recipe(data, {"pp": 2}, isolated=True)):
        assert got == pytest.approx(alone, rel=1e-6)


def evaluate(rank: int, world: int, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    parts = build_parts(recipe, Path("unused"), None)
    decoder = GatheredDecoder(parts.decoder, parts.layout)
    ids = torch.arange(2 * 13).view(2, 13) % 250
    hidden, head = decoder(ids), decoder.lm_head.weight
    return hidden, head.detach() if not hasattr(head, "full_tensor") else head.full_tensor().detach()


@pytest.mark.parametrize(
    ("parallel", "world"),
    [({"pp": 3}, 3), ({"pp": 2, "tp": 2}, 4), ({"pp": 2, "cp": 2}, 4), ({"pp": 2, "dp_shard": 2}, 4)],
    ids=["pp3", "pp2xtp2", "pp2xcp2", "pp2xfsdp2"],
)
def test_a_pipelined_decoder_is_evaluated_as_a_whole_one(
    data: Path, parallel: dict[str, Any], world: int
) -> None:
    values = {"data": {"micro_batch": 1}, "parallel": parallel}
    (hidden, head) = run_ranks(evaluate, 1, tiny_recipe(data))[0]
    for got in run_ranks(evaluate, world, tiny_recipe(data, **values)):
        torch.testing.assert_close(got[0], hidden, atol=1e-5, rtol=0)
        assert torch.equal(got[1], head)


def reductions_of_a_stage(rank: int, world: int, recipe: Recipe) -> tuple[int, int]:
    parts = build_parts(recipe, Path("unused"), None)
    units = len(parts.decoder.layers) + 1
    made = 0
    single, tensor = dist.reduce_scatter_single, dist.reduce_scatter_tensor

    def counted(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            return call(*args, **kwargs)

        return run

    dist.reduce_scatter_single, dist.reduce_scatter_tensor = counted(single), counted(tensor)
    try:
        train_step(parts.decoder, parts.optimizer, next(updates(parts)), parts.settings)
    finally:
        dist.reduce_scatter_single, dist.reduce_scatter_tensor = single, tensor
    return made, units


def test_a_sharded_stage_reduces_once_per_update(data: Path) -> None:
    recipe = toy_recipe(data, {"pp": 2, "dp_shard": 2}, isolated=False)
    assert recipe.accumulation == 2
    for made, units in run_ranks(reductions_of_a_stage, 4, recipe):
        assert made == units
