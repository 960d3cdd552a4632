"""Compare a compiled decoder with an eager one; run by test_generate."""

import torch

from zgcm_model import Decoder, ModelConfig, generate, initialize

CONFIG = ModelConfig(97, 32, 48, 2, 4, 2, 16, window=4, global_every=2)


def compare_ids() -> None:
    decoder = initialize(Decoder(CONFIG), 9)
    prompt = torch.randint(0, 97, (1, 3))
    expected = generate(decoder, prompt, 64)
    # One fixed length, so one compilation: what stands behind a position cannot change it.
    compiled, sequence = torch.compile(decoder, dynamic=False), torch.zeros(1, 67, dtype=torch.int64)
    sequence[:, :3] = prompt
    with torch.no_grad():
        for t in range(3, 67):
            sequence[:, t] = decoder.logits(compiled(sequence)[:, t - 1]).argmax(-1)
    assert torch.equal(sequence, expected), (sequence, expected)
    print("same 64 ids")


def compare_gradients() -> None:
    decoder = initialize(Decoder(CONFIG), 9)
    ids, upstream = torch.randint(0, 97, (2, 150)), torch.randn(2, 150, 32)
    expected = torch.autograd.grad(decoder(ids), list(decoder.layers.parameters()), upstream)
    compiled = torch.compile(decoder, backend="aot_eager", dynamic=False)
    got = torch.autograd.grad(compiled(ids), list(decoder.layers.parameters()), upstream)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    print("same gradients")


if __name__ == "__main__":
    torch.manual_seed(0)
    compare_ids()
    compare_gradients()
