"""Window attention in blocks against full causal attention, forward and backward."""

import torch
import torch.nn.functional as F

from zgcm_model import attention

HEADS, KV_HEADS, WIDTH = 8, 2, 64


def tensors(time):
    return [torch.randn(1, time, n, WIDTH, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS)]


def banded(time):
    query, key, value = tensors(time)
    return lambda: attention(query, key, value, window=128, kernel="banded").sum().backward()


def full_causal(time):
    query, key, value = (x.detach().transpose(1, 2).requires_grad_() for x in tensors(time))

    def work():
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()

    return work


def test_banded_against_full_causal(race, report):
    ours, full = race(banded(8192), full_causal(8192))
    report(
        f"T=8192: banded {ours:.3f} s, full causal {full:.3f} s, ratio {full / ours:.1f}", ratio=full / ours
    )
    assert full / ours >= 8


def test_banded_is_linear_in_length(race, report):
    long, short = race(banded(16384), banded(4096))
    report(f"T=16384 {long:.3f} s, T=4096 {short:.3f} s, ratio {long / short:.2f}", ratio=long / short)
    assert long / short <= 4.5
