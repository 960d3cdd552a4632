"""The chunked loss against logits of the whole batch, at the full vocabulary."""

import torch
import torch.nn.functional as F

from zgcm_model import chunked_lm_terms

VOCAB = 154_880


def problem(tokens, width):
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    weight = (torch.randn(VOCAB, width) * 0.02).requires_grad_()
    targets, mask = torch.randint(0, VOCAB, (1, tokens)), torch.ones(1, tokens, dtype=torch.bool)

    def chunked():
        hidden.grad = weight.grad = None
        total, count = chunked_lm_terms(hidden, weight, targets, mask)
        (total / count).backward()

    def naive():
        hidden.grad = weight.grad = None
        F.cross_entropy((hidden @ weight.T).float().flatten(0, 1), targets.flatten()).backward()

    return chunked, naive


def test_peak_memory(peak_bytes, report, benchmark):
    chunked, naive = (peak_bytes(work) / 2**20 for work in problem(4096, 64))
    benchmark.pedantic(lambda: None, rounds=1)
    ratio = naive / chunked
    report(
        f"loss, V=154,880, T=4096: {chunked:.0f} MiB, naive {naive:.0f} MiB, ratio {ratio:.1f}", ratio=ratio
    )
    assert ratio >= 8


def test_time(race, report):
    chunked, naive = race(*problem(1024, 256), rounds=2)
    ratio = naive / chunked
    report(f"loss, V=154,880, T=1024: {chunked:.2f} s, naive {naive:.2f} s, ratio {ratio:.2f}", ratio=ratio)
    assert ratio >= 1
