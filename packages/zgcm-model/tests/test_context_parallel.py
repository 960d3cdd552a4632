import pytest
import torch
import torch._dynamo  # once here, or every forked rank imports it again
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zgcm_model import Decoder, ModelConfig, attention, initialize
from zgcm_model.kernels import make_kernel
from zgcm_model.parallel import apply_context_parallel, apply_tensor_parallel, shard_sequence
from zgcm_model.parallel.collectives import exchange
from zgcm_model.parallel.context import ContextParallelKernel
from zgcm_testing import run_ranks

CONFIG = ModelConfig(101, 48, 60, 7, 24, 12, 6, window=4, rotary_percent=0.7, max_positions=64)


def batch(time=24):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 101, (2, time + 1), generator=generator)
    mask = torch.rand(2, time, generator=generator) < 0.6
    mask[:, : time // 2] = True  # heavy on the first half
    documents = (torch.rand(2, time, generator=generator) < 0.15).long().cumsum(1)
    return ids, mask, documents


def one_device(ids, mask, documents):
    decoder = initialize(Decoder(CONFIG), 5)
    hidden = decoder(ids[:, :-1], document_ids=documents)
    total, count = decoder.lm_terms(hidden, ids[:, 1:], mask)
    (total / count).backward()
    return hidden.detach(), total.detach(), count, {n: p.grad for n, p in decoder.named_parameters()}


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("with_documents", [False, True])
def test_outputs_and_all_gradients_equal_one_device(world, with_documents):
    ids, mask, documents = batch()
    documents = documents if with_documents else None

    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        decoder = apply_context_parallel(initialize(Decoder(CONFIG), 5), mesh)
        parts = [
            None if x is None else shard_sequence(x, mesh) for x in (ids[:, :-1], ids[:, 1:], mask, documents)
        ]
        hidden = decoder(parts[0], document_ids=parts[3])
        total, count = decoder.lm_terms(hidden, parts[1], parts[2])
        dist.all_reduce(count)
        (total / count).backward()
        total = total.detach()
        dist.all_reduce(total)
        for parameter in decoder.parameters():
            dist.all_reduce(parameter.grad)
        return hidden.detach(), total, count, {n: p.grad for n, p in decoder.named_parameters()}

    hidden, total, count, grads = one_device(ids, mask, documents)
    ranks = run_ranks(rank_main, world)
    close(torch.cat([got[0] for got in ranks], 1), hidden)
    for got in ranks:
        close(got[1], total)
        assert got[2] == count
        for name in grads:
            close(got[3][name], grads[name])


def test_with_tensor_parallel():
    ids, mask, documents = batch()

    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        decoder = apply_tensor_parallel(Decoder(CONFIG), mesh["tp"])
        initialize(apply_context_parallel(decoder, mesh["cp"]), 5)
        parts = [shard_sequence(x, mesh["cp"]) for x in (ids[:, :-1], ids[:, 1:], mask, documents)]
        hidden = decoder(parts[0], document_ids=parts[3])
        total, count = decoder.lm_terms(hidden, parts[1], parts[2])
        dist.all_reduce(count, group=mesh["cp"].get_group())
        (total / count).backward()
        grads = {}
        for name, parameter in decoder.named_parameters():
            grads[name] = parameter.grad.full_tensor()
            dist.all_reduce(grads[name], group=mesh["cp"].get_group())
        return hidden.detach(), grads

    hidden, _, _, grads = one_device(ids, mask, documents)
    ranks = run_ranks(rank_main, 4)
    close(torch.cat([ranks[0][0], ranks[2][0]], 1), hidden)
    for _, got in ranks:
        for name in grads:
            close(got[name], grads[name])


@pytest.mark.parametrize("window", [None, 1, 2, 4, 7, 40])
@pytest.mark.parametrize("world", [2, 4])
def test_m13_gradients_of_queries_keys_and_values(window, world):
    generator = torch.Generator().manual_seed(3)
    query, key, value, upstream = (torch.randn(2, 16, n, 8, generator=generator) for n in (8, 4, 4, 8))
    ids = (torch.arange(16) >= 5).long().expand(2, 16)

    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        kernel = ContextParallelKernel(make_kernel("banded"), mesh.get_group())
        parts = [shard_sequence(x, mesh).clone().requires_grad_() for x in (query, key, value)]
        results = []
        for documents in (None, shard_sequence(ids, mesh)):
            out = attention(*parts, window=window, document_ids=documents, kernel=kernel)
            results += [out.detach(), *torch.autograd.grad(out, parts, shard_sequence(upstream, mesh))]
        return results

    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = []
    for documents in (None, ids):
        out = attention(*whole, window=window, document_ids=documents, kernel="reference")
        expected += [out.detach(), *torch.autograd.grad(out, whole, upstream)]
    ranks = run_ranks(rank_main, world)
    for index, want in enumerate(expected):
        got = torch.cat([rank[index] for rank in ranks], 1)
        assert (got - want).norm() <= 1e-5 * want.norm().clamp(min=1)


def sent_elements(work):
    """Run ``work`` and count the elements this rank sends to others."""
    sent = {"halo": 0, "all_to_all": 0}
    point, all_to_all = dist.P2POp, dist.all_to_all_single

    def counted_point(op, tensor, *args, **kwargs):
        sent["halo"] += tensor.numel() if op is dist.isend else 0
        return point(op, tensor, *args, **kwargs)

    def counted_all_to_all(out, source, group):
        sent["all_to_all"] += source.numel() * (group.size() - 1) // group.size()
        return all_to_all(out, source, group=group)

    dist.P2POp, dist.all_to_all_single = counted_point, counted_all_to_all
    try:
        work()
    finally:
        dist.P2POp, dist.all_to_all_single = point, all_to_all
    return sent


def test_a_window_layer_sends_the_same_bytes_at_every_length(capsys):
    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        kernel = ContextParallelKernel(make_kernel("banded"), mesh.get_group())
        rows = []

        def attend(parts, window):
            attention(*parts, window=window, kernel=kernel).sum().backward()

        for time in (512, 1024, 2048):
            parts = [torch.randn(1, time // world, n, 16, requires_grad=True) for n in (8, 4, 4)]
            for window in (128, None):
                rows.append((time, window, sent_elements(lambda p=parts, w=window: attend(p, w))))
        return rows

    (rows, _) = run_ranks(rank_main, 2)
    width = 4 * 16  # key heads times their width
    with capsys.disabled():
        for time, window, sent in rows:
            kind = "global" if window is None else "window"
            print(f"\n  {kind} layer, T={time}: {4 * sum(sent.values()):,} bytes sent by rank 0", end="")
    for time, window, sent in rows:
        if window is None:
            # Queries, keys, values and the output, forward and backward; half of each leaves the rank.
            assert sent == {"halo": 0, "all_to_all": 2 * (2 * 8 + 2 * 4) * 16 * (time // 2) // 2}
        else:
            # Keys and values of 127 positions forward; rank 0 has nobody to return gradients to.
            assert sent == {"halo": 2 * 127 * width, "all_to_all": 0}


def test_m12_odd_packed_lengths_are_refused_and_never_shortened():
    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        with pytest.raises(ValueError, match="7 positions do not divide over context_parallel=2"):
            shard_sequence(torch.zeros(1, 7), mesh)
        decoder = apply_context_parallel(Decoder(CONFIG), mesh)
        with pytest.raises(ValueError, match="past max_positions=64"):
            decoder(torch.zeros(1, 33, dtype=torch.int64)) if rank else decoder(
                torch.zeros(1, 65, dtype=torch.int64)
            )
        # Packed lengths 4 and 3 with one padding position: seven targets count on two ranks as on one.
        mask = torch.tensor([[True] * 7 + [False]])
        return shard_sequence(mask, mesh).sum()

    assert sum(run_ranks(rank_main, 2)) == 7


def test_t4_every_position_keeps_its_label_across_the_cut():
    row = torch.arange(9)[None]

    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        return torch.stack((shard_sequence(row[:, :-1], mesh), shard_sequence(row[:, 1:], mesh)), -1)[
            0
        ].tolist()

    pairs = [pair for rank in run_ranks(rank_main, 2) for pair in rank]
    assert pairs == [[i, i + 1] for i in range(8)]


def test_heads_that_do_not_divide_are_refused(toy):
    def rank_main(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        with pytest.raises(ValueError, match="num_kv_heads=2 does not divide over context_parallel=3"):
            apply_context_parallel(Decoder(toy), mesh)
        kernel = ContextParallelKernel(make_kernel("banded"), mesh.get_group())
        tensors = [torch.zeros(1, 2, 2, 4) for _ in range(3)]
        with pytest.raises(ValueError, match="2 key/value heads on this rank do not divide"):
            kernel(*tensors, window=None, documents=None)
        with pytest.raises(ValueError, match="cache cannot be used under context parallelism"):
            kernel(tensors[0][:, :1], *tensors[1:], window=None, documents=None)

    run_ranks(rank_main, 3)


def exchange_any_strides(rank, world):
    whole = torch.arange(2 * 8 * 4 * 6.0).view(2, 8, 4, 6)
    for strides in (torch.contiguous_format, torch.channels_last):
        mine = whole.chunk(world, 1)[rank].contiguous(memory_format=strides)
        heads = exchange(mine, 2, 1, dist.group.WORLD)
        assert torch.equal(heads, whole.chunk(world, 2)[rank])
        back = exchange(heads.contiguous(memory_format=strides), 1, 2, dist.group.WORLD)
        assert torch.equal(back, mine)


def test_the_exchange_takes_tensors_of_any_strides():
    run_ranks(exchange_any_strides, 2)
