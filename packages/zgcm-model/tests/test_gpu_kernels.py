"""GPU kernels: their rules and arguments on a CPU, themselves where there is a GPU."""

import sys
import types

import pytest
import torch

from zgcm_model import Decoder, attention, generate, initialize
from zgcm_model.kernels import choose_kernel, make_kernel
from zgcm_model.kernels.flex import FlexKernel
from zgcm_model.kernels.reference import ReferenceKernel

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
)


def tensors(queries=37, keys=37, dtype=torch.float32, device="cpu", width=16):
    shapes = [(2, queries, 4, width), (2, keys, 2, width), (2, keys, 2, width)]
    return [torch.randn(*s, dtype=dtype, device=device, requires_grad=True) for s in shapes]


def documents(length=37):
    return torch.stack((torch.arange(length) // 10, torch.arange(length) // 29))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("past", [0, 6])
def test_flex_rules_equal_reference(window, past):
    # Without gradients: FlexAttention has no backward on a CPU.
    query, key, value = (x.detach() for x in tensors(queries=37 - past))
    for ids in (None, documents()) if past == 0 else (None,):
        got = attention(query, key, value, window=window, document_ids=ids, kernel=FlexKernel(compiled=False))
        expected = attention(query, key, value, window=window, document_ids=ids, kernel="reference")
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_decodes_with_a_cache(toy):
    decoder, ids = (
        initialize(Decoder(toy, kernel=FlexKernel(compiled=False)), 3),
        torch.randint(0, 97, (1, 20)),
    )
    assert torch.equal(generate(decoder, ids, 8), generate(initialize(Decoder(toy), 3), ids, 8))


def test_auto_picks_flex_on_a_gpu():
    assert choose_kernel(torch.device("cuda")) == "flex"
    assert choose_kernel(torch.device("cpu")) == "banded"


@pytest.mark.parametrize(("kernel", "extra"), [("flash", "flash"), ("transformer_engine", "te")])
@pytest.mark.parametrize("error", [ImportError, OSError])
def test_p4_a_missing_or_broken_library_names_the_extra(kernel, extra, error, monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("flash_attn", "transformer_engine"):
                raise error(f"{name} needs a driver")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ImportError, match=rf'pip install "zgcm-model\[{extra}\]"'):
        make_kernel(kernel)


def by_segments(query, key, value, ends, window):
    """What a packed kernel must compute, by the reference."""
    spans = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    parts = [[x[None, a:b] for x in (query, key, value)] for a, b in spans]
    return torch.cat([ReferenceKernel()(*p, window=window, documents=None)[0] for p in parts])


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins with the two libraries' documented arguments, computing by the reference."""

    def window_of(reach):
        return None if reach[0] < 0 else reach[0] + 1

    def flash_attn_func(q, k, v, *, causal, window_size):
        assert causal
        return ReferenceKernel()(q, k, v, window=window_of(window_size), documents=None)

    def flash_attn_varlen_func(q, k, v, ends_q, ends_k, longest_q, longest_k, *, causal, window_size):
        assert causal
        assert ends_q.dtype == torch.int32
        assert longest_q == longest_k == int((ends_q[1:] - ends_q[:-1]).max())
        return by_segments(q, k, v, ends_k, window_of(window_size))

    class DotProductAttention:
        def __init__(self, num_attention_heads, kv_channels, *, num_gqa_groups):
            self.shape = (num_attention_heads, num_gqa_groups, kv_channels)

        def __call__(self, q, k, v, *, qkv_format, attn_mask_type, window_size, cu_seqlens_q=None, **lengths):
            assert (q.shape[-2], k.shape[-2], q.shape[-1]) == self.shape
            if qkv_format == "bshd":
                assert attn_mask_type == "causal_bottom_right"
                out = ReferenceKernel()(q, k, v, window=window_of(window_size), documents=None)
            else:
                assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
                assert set(lengths) == {"cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"}
                out = by_segments(q, k, v, cu_seqlens_q, window_of(window_size))
            return out.flatten(-2)

    flash, te, te_torch = (types.ModuleType(n) for n in ("flash_attn", "transformer_engine", "x"))
    flash.flash_attn_func, flash.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    te_torch.DotProductAttention = te.DotProductAttention = DotProductAttention
    te.pytorch = te_torch
    for name, module in {
        "flash_attn": flash,
        "transformer_engine": te,
        "transformer_engine.pytorch": te_torch,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("kernel", ["flash", "transformer_engine"])
@pytest.mark.parametrize("window", [None, 5])
def test_library_kernels_ask_for_the_right_thing(kernel, window, libraries):
    query, key, value = tensors(dtype=torch.bfloat16)
    for ids in (None, documents()):
        got = attention(query, key, value, window=window, document_ids=ids, kernel=kernel)
        expected = attention(query, key, value, window=window, document_ids=ids, kernel="reference")
        torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)
    shorter = attention(query[:, 5:], key, value, window=window, kernel=kernel)
    expected = attention(query[:, 5:], key, value, window=window, kernel="reference")
    torch.testing.assert_close(shorter, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kernel", ["flash", "transformer_engine"])
def test_library_kernels_refuse_what_they_cannot_do(kernel, libraries):
    with pytest.raises(ValueError, match=f"kernel='{kernel}' cannot compute in torch.float32"):
        attention(*tensors(), kernel=kernel)
    returning = torch.tensor([[0, 1, 0] * 12 + [0]] * 2)
    with pytest.raises(ValueError, match="each document is one run"):
        attention(*tensors(dtype=torch.bfloat16), document_ids=returning, kernel=kernel)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("window", [None, 128])
def test_compiled_flex_on_a_gpu_equals_reference(device, window):
    query, key, value = tensors(1000, 1000, device=device, width=64)
    ids = (torch.arange(1000, device=device) // 300).expand(2, 1000)
    for document_ids in (None, ids):
        got, expected = (
            attention(query, key, value, window=window, document_ids=document_ids, kernel=kernel)
            for kernel in ("flex", "reference")
        )
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
        upstream = torch.randn_like(query)
        grads = [torch.autograd.grad(x, (query, key, value), upstream) for x in (got, expected)]
        torch.testing.assert_close(grads[0], grads[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("device", [GPU])
def test_decoder_on_a_gpu_equals_the_cpu(device, toy):
    decoder, ids = initialize(Decoder(toy), 3), torch.randint(0, 97, (2, 200))
    expected = decoder(ids)
    on_gpu = Decoder(toy, kernel="reference").to(device)
    initialize(on_gpu, 3)
    torch.testing.assert_close(on_gpu(ids.to(device)).cpu(), expected, atol=1e-3, rtol=1e-3)
