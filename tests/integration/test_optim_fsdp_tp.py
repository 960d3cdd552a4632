"""The model and the optimizer together: FSDP2 over tensor parallelism trains as one process does."""

import torch
import torch._dynamo  # once here, or every forked rank imports it again
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zgcm_model import Decoder, ModelConfig, initialize
from zgcm_model.parallel import apply_tensor_parallel
from zgcm_optim import Muon, clip_grad_norm_, route_parameters, schedule
from zgcm_testing import run_ranks

# Seven layers hold gated and ungated ones; a vocabulary of 101 is cut into uneven shares.
CONFIG = ModelConfig(101, 48, 60, 7, 8, 4, 6, window=4, rotary_percent=0.7, max_positions=64)
STEPS, ROWS, TIME = 8, 4, 12


def batch(step: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of a batch whose targets repeat, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step % 2)
    ids = torch.randint(0, CONFIG.vocab_size, (ROWS, TIME + 1), generator=generator)
    return ids[rows, :-1], ids[rows, 1:]


def train(decoder: Decoder, optimizer: Muon, rows: slice) -> list[float]:
    """Return the summed loss of each step over these rows; the gradient is that of the mean over all."""
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = schedule.constant(step + 1, peak=5e-3, warmup=4)
        inputs, targets = batch(step, rows)
        total, count = decoder.lm_terms(decoder(inputs), targets, torch.ones_like(targets, dtype=torch.bool))
        optimizer.zero_grad()
        # FSDP takes the mean over the data-parallel ranks, whose counts are equal.
        (total / count).backward()
        clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        losses.append(total.item())
    return losses


def rank_main(rank: int, world: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        decoder = Decoder(CONFIG)
    apply_tensor_parallel(decoder, mesh["tp"])
    for block in decoder.blocks():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(decoder, mesh=mesh["dp"])
    initialize(decoder.to_empty(device="cpu"), 5)
    optimizer = Muon(route_parameters(decoder), 5e-3, dtype=torch.float32)
    half = mesh.get_local_rank("dp") * ROWS // 2
    return train(decoder, optimizer, slice(half, half + ROWS // 2))


def test_fsdp_over_tensor_parallel_gives_the_losses_of_one_process() -> None:
    decoder = initialize(Decoder(CONFIG), 5)
    optimizer = Muon(route_parameters(decoder), 5e-3, dtype=torch.float32)
    expected = torch.tensor(train(decoder, optimizer, slice(0, ROWS))) / (ROWS * TIME)
    ranks = torch.tensor(run_ranks(rank_main, 4)) / (ROWS * TIME)
    assert torch.equal(ranks[0], ranks[1])
    assert torch.equal(ranks[2], ranks[3])
    torch.testing.assert_close(ranks[0] + ranks[2], expected, atol=1e-4, rtol=0)
    assert expected[-1] < expected[0] - 0.5
