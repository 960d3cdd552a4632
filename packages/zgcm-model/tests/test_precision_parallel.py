"""FP8 under FSDP2, tensor and context parallelism equals one process."""

import functools

import pytest
import torch
import torch._dynamo  # once here, or every forked rank imports it again
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from zgcm_model import Decoder, ModelConfig, initialize, load_weights, precision, save_pretrained
from zgcm_model.parallel import apply_context_parallel, apply_tensor_parallel, shard_sequence
from zgcm_model.precision import DelayedScaling, HighPrecision
from zgcm_model.precision.gather import ShardedWeight
from zgcm_testing import run_ranks

# No width divides by 3 or 4; one key head has 2 query heads.
CONFIG = ModelConfig(97, 26, 42, 2, 4, 2, 14, window=4, global_every=2, max_positions=64)
RECIPE = DelayedScaling(amax_history_len=4)


def batches(count, rows=4, time=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 97, (rows, time + 1), generator=generator) for _ in range(count)]


class CountingAllGather:
    """Adds up the bytes that a rank sends."""

    def __init__(self, sent):
        self.sent = sent

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.sent.append(input_tensor.numel() * input_tensor.element_size())
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def build(
    shard=None, *, fp8_gather=False, tensor=None, sequence=True, table=None, sent=None, recompute=False
):
    with torch.device("meta"):
        decoder = Decoder(CONFIG)
    precision.apply(decoder, RECIPE, high_precision=table)
    if tensor is not None:
        apply_tensor_parallel(decoder, tensor, sequence)
    for block in decoder.layers if recompute else ():
        again = functools.partial(checkpoint, block.forward, use_reentrant=False)
        object.__setattr__(block, "forward", again)
    if fp8_gather:
        precision.gather_in_fp8(decoder)
    if shard is not None:
        for module in (*decoder.layers, decoder):
            fsdp = fully_shard(module, mesh=shard)
            fsdp.set_gradient_divide_factor(1.0)
            fsdp.set_force_sum_reduction_for_comms(True)
            if sent is not None:
                fsdp.set_custom_all_gather(CountingAllGather(sent))
    return initialize(decoder.to_empty(device="cpu"), 3)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(decoder, steps=3, group=None, cut=lambda ids: ids, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(decoder.parameters(), 0.3, momentum=0.9)
    losses = []
    for ids in batches(steps):
        total = torch.zeros(())
        for part in ids.chunk(2):  # two micro-batches
            inputs, targets = cut(part[:, :-1]), cut(part[:, 1:])
            loss, _ = decoder.lm_terms(decoder(inputs), targets, torch.ones_like(targets) > 0)
            (loss / 32).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        precision.update_scales(decoder, group)
        losses.append(total)
    return torch.stack(losses)


def state_of(decoder):
    return {name: value.clone() for name, value in precision.scaling_state(decoder).state_dict().items()}


def outcome(decoder, losses):
    return losses, state_of(decoder), {name: whole(p) for name, p in decoder.named_parameters()}


def rows_of_rank(rank, world):
    """Give each rank some rows of a micro-batch of two, possibly none of its own: then the same as rank 0's."""
    return lambda ids: ids[rank % 2 :: 2] if world % 2 == 0 else ids


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_gather_in_fp8_carries_one_byte_per_element_and_equals_the_float32_gather(world):
    def rank_main(rank, world):
        mesh, results = init_device_mesh("cpu", (world,)), []
        for fp8_gather in (False, True):
            sent = []
            decoder = build(shard=mesh, fp8_gather=fp8_gather, sent=sent)
            losses = train(decoder, group=dist.group.WORLD, cut=rows_of_rank(rank, world))
            results.append((*outcome(decoder, losses), sent))
            assert (
                isinstance(decoder.layers[0].attention.q_proj.weight.to_local(), ShardedWeight) == fp8_gather
            )
        return results

    for rank, (plain, scaled) in enumerate(run_ranks(rank_main, world)):
        assert torch.equal(scaled[0], plain[0]), rank
        for left, right in ((scaled[1], plain[1]), (scaled[2], plain[2])):
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)
        assert len(plain[3]) == len(scaled[3])
        assert sum(plain[3]) - sum(scaled[3]) == saved_bytes(world)


def saved_bytes(world):
    """Three bytes of four for each element of a projection's padded shard, in each of its gathers."""
    elements = 0
    for name, parameter in Decoder(CONFIG).named_parameters():
        if "_proj" in name:
            elements += -(-parameter.shape[0] // world) * parameter.shape[1]
    gathers = 2 * 2 * 3  # forward and backward, two micro-batches, three steps
    return 3 * elements * gathers


def test_fsdp_in_fp8_follows_one_process():
    def rank_main(rank, world):
        decoder = build(shard=init_device_mesh("cpu", (world,)), fp8_gather=True)
        losses = train(decoder, group=dist.group.WORLD, cut=rows_of_rank(rank, world))
        dist.all_reduce(losses)
        return outcome(decoder, losses)

    decoder = build()
    losses = train(decoder)
    for got in run_ranks(rank_main, 2):
        # Gradients are scaled by the amaxes of more rows, but each element is rounded alike.
        torch.testing.assert_close(got[0], losses, rtol=1e-4, atol=0)
        torch.testing.assert_close(got[1]["scale"], state_of(decoder)["scale"], rtol=0.05, atol=0)


def test_a_gather_in_fp8_leaves_files_checkpoints_and_high_precision_alone(tmp_path):
    table = HighPrecision(layers={"down": (-1,)})

    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        decoder = build(shard=mesh, fp8_gather=True, table=table)
        train(decoder, group=dist.group.WORLD)
        assert type(decoder.layers[1].feed_forward.down_proj.weight.to_local()) is torch.Tensor
        state = {f"model.{name}": value.detach() for name, value in decoder.state_dict().items()}
        dcp.save(state, checkpoint_id=tmp_path / "dcp")
        save_pretrained(decoder, tmp_path / "files")
        want = outcome(decoder, train(decoder, 1, group=dist.group.WORLD))

        again = build(shard=mesh, fp8_gather=True, table=table)
        target = {f"model.{name}": value.detach() for name, value in again.state_dict().items()}
        dcp.load(target, checkpoint_id=tmp_path / "dcp")
        got = outcome(again, train(again, 1, group=dist.group.WORLD))
        loaded = build(shard=mesh, fp8_gather=True, table=table)
        load_weights(loaded, tmp_path / "files")
        return want, got, {name: whole(p) for name, p in loaded.named_parameters()}, state_names(target)

    plain = build()
    load_me = None
    for want, got, loaded, names in run_ranks(rank_main, 2):
        assert torch.equal(got[0], want[0])
        for left, right in ((got[1], want[1]), (got[2], want[2])):
            assert all(torch.equal(left[name], right[name]) for name in right)
        assert names == {f"model.{name}" for name in plain.state_dict()}
        load_me = loaded
    load_weights(plain, tmp_path / "files")
    assert all(torch.equal(load_me[name], p) for name, p in plain.named_parameters())
    # A program without this package's tensor classes reads the checkpoint.
    stored = {"model.layers.0.attention.q_proj.weight": torch.empty(56, 26)}
    dcp.load(stored, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(
        stored["model.layers.0.attention.q_proj.weight"], load_me["layers.0.attention.q_proj.weight"]
    )


def state_names(state):
    return set(state)


@pytest.mark.parametrize("world", [1, 2])
def test_a_gather_in_fp8_with_recomputed_layers(world):
    def rank_main(rank, world):
        mesh, results = init_device_mesh("cpu", (world,)), []
        for fp8_gather, again in ((False, False), (True, False), (True, True)):
            decoder = build(shard=mesh, fp8_gather=fp8_gather, recompute=again)
            losses = train(decoder, group=dist.group.WORLD, cut=lambda ids: ids[rank::world])
            results.append(outcome(decoder, losses))
        return results

    for first, *others in run_ranks(rank_main, world):
        for other in others:
            assert torch.equal(other[0], first[0])
            assert all(torch.equal(other[1][name], first[1][name]) for name in first[1])
            assert all(torch.equal(other[2][name], first[2][name]) for name in first[2])


def test_a_sharded_gather_needs_a_group_and_the_right_order():
    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        decoder = build(shard=mesh, fp8_gather=True)
        with pytest.raises(ValueError, match="needs a group when weights are gathered in FP8"):
            precision.update_scales(decoder)
        with pytest.raises(ValueError, match="call gather_in_fp8 before fully_shard"):
            precision.gather_in_fp8(decoder)
        with pytest.raises(ValueError, match="before apply_tensor_parallel and fully_shard"):
            precision.apply(apply_tensor_parallel(Decoder(CONFIG), mesh), RECIPE)

    run_ranks(rank_main, 2)


# Each element is rounded to FP8 as on one device, but sums that end in another last bit move some of them to the
# neighbouring FP8 value, a sixteenth away.
CLOSE = {"rtol": 2e-3, "atol": 0}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_parallel_ranks_equal_one_process(sequence_parallel):
    def rank_main(rank, world):
        decoder = build(tensor=init_device_mesh("cpu", (world,)), sequence=sequence_parallel)
        losses = train(decoder, group=dist.group.WORLD)
        return outcome(decoder, losses)

    decoder = build()
    losses = train(decoder)
    first, second = run_ranks(rank_main, 2)
    for got in (first, second):
        torch.testing.assert_close(got[0], losses, **CLOSE)
        torch.testing.assert_close(
            got[1]["amax_history"], state_of(decoder)["amax_history"], rtol=0.05, atol=1e-6
        )
        for name, parameter in decoder.named_parameters():
            difference = (got[2][name] - parameter).norm() / parameter.norm()
            assert difference < 0.01, (name, difference)
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_tensor_parallel_and_fsdp_with_a_gather_in_fp8():
    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        results = []
        for fp8_gather in (False, True):
            decoder = build(tensor=mesh["tp"], shard=mesh["dp"], fp8_gather=fp8_gather)
            losses = train(
                decoder, group=dist.group.WORLD, cut=lambda ids: ids[mesh.get_local_rank("dp") :: 2]
            )
            results.append(outcome(decoder, losses))
        return results

    for plain, scaled in run_ranks(rank_main, 4):
        assert torch.equal(plain[0], scaled[0])
        assert all(torch.equal(plain[1][name], scaled[1][name]) for name in plain[1])
        assert all(torch.equal(plain[2][name], scaled[2][name]) for name in plain[2])


def test_two_context_parallel_ranks_equal_one_process():
    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        decoder = apply_context_parallel(precision.apply(Decoder(CONFIG), RECIPE), mesh)
        for module in (*decoder.layers, decoder):
            fsdp = fully_shard(module, mesh=mesh)
            fsdp.set_gradient_divide_factor(1.0)
            fsdp.set_force_sum_reduction_for_comms(True)
        initialize(decoder, 3)
        losses = train(decoder, group=dist.group.WORLD, cut=lambda ids: shard_sequence(ids, mesh))
        dist.all_reduce(losses)
        return outcome(decoder, losses)

    decoder = build()
    losses = train(decoder)
    for got in run_ranks(rank_main, 2):
        torch.testing.assert_close(got[0], losses, **CLOSE)
        torch.testing.assert_close(
            got[1]["amax_history"], state_of(decoder)["amax_history"], rtol=0.05, atol=1e-6
        )
