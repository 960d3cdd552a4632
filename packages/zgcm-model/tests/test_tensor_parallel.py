import pytest
import torch
import torch._dynamo  # once here, or every forked rank imports it again
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from zgcm_model import Decoder, ModelConfig, generate, initialize, save_pretrained
from zgcm_model.parallel import apply_tensor_parallel, vocabulary_parallel_lm_terms
from zgcm_model.parallel.vocabulary import vocabulary_shard
from zgcm_testing import run_ranks

# 101 rows are cut into uneven shares; head counts divide by 2, 3 and 4.
CONFIG = ModelConfig(101, 48, 60, 7, 24, 12, 6, window=4, rotary_percent=0.7, max_positions=64)


def batch(time=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 101, (2, time + 1), generator=generator)
    mask = torch.rand(2, time, generator=generator) < 0.8
    documents = (torch.rand(2, time, generator=generator) < 0.2).long().cumsum(1)
    return ids, mask, documents


def on_meta(mesh, sequence_parallel=True):
    with torch.device("meta"):
        decoder = Decoder(CONFIG)
    return apply_tensor_parallel(decoder, mesh, sequence_parallel)


def run(decoder, ids, mask, documents):
    hidden = decoder(ids[:, :-1], document_ids=documents)
    hidden.retain_grad()
    total, count = decoder.lm_terms(hidden, ids[:, 1:], mask, z_loss=1e-3)
    (total / count).backward()
    return total.detach(), hidden.detach(), hidden.grad


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(decoder):
    return {name: full(p.grad) for name, p in decoder.named_parameters()}


def expected(config=CONFIG, data=None):
    decoder = initialize(Decoder(config), 5)
    total, hidden, hidden_grad = run(decoder, *(data or batch()))
    return total, hidden, hidden_grad, gradients(decoder)


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_outputs_and_all_gradients_equal_one_device(world, sequence_parallel):
    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        decoder = apply_tensor_parallel(Decoder(CONFIG), mesh, sequence_parallel)
        initialize(decoder, 5)
        total, hidden, hidden_grad = run(decoder, *batch())
        local = {name: p.grad.to_local() for name, p in decoder.named_parameters() if p.dim() == 1}
        return total, hidden, hidden_grad, gradients(decoder), local

    total, hidden, hidden_grad, grads = expected()
    ranks = run_ranks(rank_main, world)
    for got in ranks:
        close(got[0], total)
        close(got[1], hidden)
        close(got[2], hidden_grad)
        assert got[3].keys() == grads.keys()
        for name in grads:
            close(got[3][name], grads[name])
    # M9: the replicated scales have one gradient, not one per rank.
    for name in ranks[0][4]:
        assert all(torch.equal(got[4][name], ranks[0][4][name]) for got in ranks), name


def test_m9_replicated_scales_stay_equal_over_three_steps():
    def train(decoder):
        optimizer = torch.optim.SGD(decoder.parameters(), 0.5)
        for seed in range(3):
            optimizer.zero_grad()
            run(decoder, *batch(seed=seed))
            optimizer.step()
        return decoder

    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        decoder = train(initialize(on_meta(mesh).to_empty(device="cpu"), 5))
        local = {n: p.to_local() for n, p in decoder.named_parameters() if p.dim() == 1}
        return local, {n: full(p) for n, p in decoder.named_parameters()}

    one = dict(train(initialize(Decoder(CONFIG), 5)).named_parameters())
    (first, whole), (second, _) = run_ranks(rank_main, 2)
    assert len(first) == 7 * 4 + 1
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    for name, value in whole.items():
        close(value, one[name])


def test_weights_of_one_rank_are_given_to_all_and_written_whole(tmp_path):
    def rank_main(rank, world):
        decoder = initialize(Decoder(CONFIG), 5 if rank == 0 else 99)
        apply_tensor_parallel(decoder, init_device_mesh("cpu", (world,)))
        save_pretrained(decoder, tmp_path)
        assert isinstance(decoder.embed_tokens, nn.Embedding)
        assert isinstance(decoder.layers[0].attention.q_proj, nn.Linear)
        shape = decoder.layers[0].attention.q_proj.weight.to_local().shape
        return shape, {n: full(p) for n, p in decoder.named_parameters()}

    one = dict(initialize(Decoder(CONFIG), 5).named_parameters())
    for shape, weights in run_ranks(rank_main, 2):
        assert tuple(shape) == (72, 48)
        assert all(torch.equal(weights[name], one[name]) for name in one)
    assert (tmp_path / "model.safetensors").exists()


def test_logits_and_generation_under_tensor_parallel():
    ids = batch()[0][:, :5]

    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        decoder = initialize(on_meta(mesh, sequence_parallel=False).to_empty(device="cpu"), 5)
        logits = decoder.logits(decoder(ids))
        (grad,) = torch.autograd.grad(logits.square().sum(), decoder.norm.weight)
        return logits.detach(), full(grad), generate(decoder, ids, 6)

    one = initialize(Decoder(CONFIG), 5)
    logits = one.logits(one(ids))
    (grad,) = torch.autograd.grad(logits.square().sum(), one.norm.weight)
    for got in run_ranks(rank_main, 3):
        close(got[0], logits.detach())
        close(got[1], grad)
        assert torch.equal(got[2], generate(one, ids, 6))


def test_fsdp_over_tensor_parallel_from_meta():
    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        decoder = on_meta(mesh["tp"])
        for block in decoder.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(decoder, mesh=mesh["dp"])
        initialize(decoder.to_empty(device="cpu"), 5)
        weights = {n: full(p) for n, p in decoder.named_parameters()}
        total, hidden, _ = run(decoder, *batch())
        return total, hidden, weights, gradients(decoder)

    one = initialize(Decoder(CONFIG), 5)
    total, hidden, _, grads = expected()
    for got in run_ranks(rank_main, 4):
        for name, parameter in one.named_parameters():
            assert torch.equal(got[2][name], parameter), name
        close(got[0], total)
        close(got[1], hidden)
        for name in grads:
            close(got[3][name], grads[name])


@pytest.mark.parametrize(("rows", "real", "world"), [(5, 5, 4), (9, 9, 2), (16, 10, 4), (3, 2, 3)])
def test_uneven_empty_and_padding_shares_of_the_vocabulary(rows, real, world):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 6, 8, generator=generator)
    weight = torch.randn(rows, 8, generator=generator)
    targets = torch.randint(0, real, (2, 6), generator=generator)
    mask = torch.rand(2, 6, generator=generator) < 0.7

    def rank_main(rank, world):
        shard = vocabulary_shard(rows, real, torch.distributed.group.WORLD)
        h = hidden.clone().requires_grad_()
        local = weight[shard.start : shard.stop].clone().requires_grad_()
        total, count = vocabulary_parallel_lm_terms(h, local, targets, mask, shard, chunk=5, z_loss=0.01)
        (total * 0.5).backward()
        return total.detach(), count, h.grad, local.grad

    from zgcm_model import chunked_lm_terms

    h, w = hidden.clone().requires_grad_(), weight[:real].clone().requires_grad_()
    total, count = chunked_lm_terms(h, w, targets, mask, z_loss=0.01)
    (total * 0.5).backward()
    ranks = run_ranks(rank_main, world)
    for got in ranks:
        close(got[0], total.detach())
        assert got[1] == count
        close(got[2], h.grad)
    close(torch.cat([got[3] for got in ranks]), w.grad)


@pytest.mark.parametrize(("rows", "real", "world"), [(101, 101, 4), (128, 97, 3), (2, 1, 4)])
def test_shares_cover_the_vocabulary_once(rows, real, world):
    def rank_main(rank, world):
        shard = vocabulary_shard(rows, real, torch.distributed.group.WORLD)
        return list(range(shard.start, shard.stop))

    assert [i for ids in run_ranks(rank_main, world) for i in ids] == list(range(real))


def test_m15_fewer_key_heads_than_ranks_is_refused(toy):
    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        with pytest.raises(ValueError, match="num_kv_heads=2 does not divide over tensor_parallel=4"):
            apply_tensor_parallel(Decoder(toy), mesh)
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match="pass one axis"):
            apply_tensor_parallel(Decoder(toy), square)
        with pytest.raises(ValueError, match=r"5 positions do not divide over tensor_parallel=2"):
            apply_tensor_parallel(Decoder(toy), square["tp"])(torch.zeros(1, 5, dtype=torch.int64))

    run_ranks(rank_main, 4)
