import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zgcm_model import attention
from zgcm_model.kernels import AutoKernel, Documents, make_kernel
from zgcm_model.kernels.banded import BandedKernel
from zgcm_model.kernels.reference import ReferenceKernel
from zgcm_model.kernels.segments import find_segments


def oracle(query, key, value, window, query_ids=None, key_ids=None):
    """Attention by loops over single queries and keys; nothing shared with the kernels."""
    batch, queries, heads, width = query.shape
    keys, group = key.shape[1], heads // key.shape[2]
    out = torch.zeros_like(query)
    for b in range(batch):
        for i in range(queries):
            place = keys - queries + i
            seen = [
                j
                for j in range(keys)
                if 0 <= place - j < (window or keys)
                and (query_ids is None or query_ids[b, i] == key_ids[b, j])
            ]
            for n in range(heads):
                scores = torch.stack([query[b, i, n] @ key[b, j, n // group] for j in seen]) / width**0.5
                out[b, i, n] = scores.softmax(0) @ torch.stack([value[b, j, n // group] for j in seen])
    return out


def tensors(batch, queries, keys, heads, kv_heads, width=4, dtype=torch.float64):
    shapes = [(batch, queries, heads, width), (batch, keys, kv_heads, width), (batch, keys, kv_heads, width)]
    return [torch.randn(*s, dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("kernel", [ReferenceKernel(), BandedKernel()], ids=lambda k: k.name)
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("with_documents", [False, True])
def test_kernels_equal_the_brute_force_oracle(kernel, window, with_documents):
    query, key, value = tensors(2, 7, 9, 4, 2)
    documents = None
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5]])
    if with_documents:
        documents = Documents(ids[:, 2:], ids)
    expected = oracle(query, key, value, window, documents and documents.query_ids, ids)
    got = kernel(query, key, value, window=window, documents=documents)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_banded_equals_reference_forward_and_backward(data):
    queries = data.draw(st.integers(1, 330), label="T")
    past = data.draw(st.sampled_from([0, 0, 1, 63, 127, 200]), label="past")
    window = data.draw(st.sampled_from([None, 1, 2, 5, 64, 65, 128, 129, 300]), label="window")
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 2), (1, 3)]), label="heads")
    query, key, value = tensors(2, queries, queries + past, kv_heads * group, kv_heads)
    documents = None
    if data.draw(st.booleans(), label="documents"):
        starts = torch.rand(2, queries + past) < data.draw(st.sampled_from([0.0, 0.02, 0.3]))
        ids = starts.long().cumsum(1)
        if data.draw(st.booleans(), label="returning ids"):
            ids = ids % 2
        documents = Documents(ids[:, past:], ids)
    upstream = torch.randn_like(query)
    results = []
    for kernel in (ReferenceKernel(), BandedKernel()):
        out = kernel(query, key, value, window=window, documents=documents)
        results.append((out, *torch.autograd.grad(out, (query, key, value), upstream)))
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("window", [None, 128])
def test_nothing_outside_window_or_document_reaches_a_query(window):
    query, key, value = tensors(1, 300, 300, 2, 1, dtype=torch.float32)
    ids = (torch.arange(300) >= 250).long()[None]
    out = attention(query, key, value, window=window, document_ids=ids, kernel="banded")
    grad = torch.autograd.grad(out[:, 299].sum(), value)[0].abs().sum((0, 2, 3))
    assert (grad > 0).nonzero().flatten().tolist() == list(range(250, 300))
    out = attention(query, key, value, window=window, kernel="banded")
    grad = torch.autograd.grad(out[:, 299].sum(), value)[0].abs().sum((0, 2, 3))
    assert (grad > 0).nonzero().flatten().tolist() == list(range(172 if window else 0, 300))


def test_half_precision_stays_near_reference():
    query, key, value = (x.detach().bfloat16() for x in tensors(1, 300, 300, 4, 2, width=32))
    got = attention(query, key, value, window=128, kernel="banded")
    expected = attention(query, key, value, window=128, kernel="reference")
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_auto_says_what_it_picked(caplog):
    kernel = make_kernel("auto")
    assert isinstance(kernel, AutoKernel)
    assert kernel.name == "auto"
    query, key, value = tensors(1, 3, 3, 1, 1)
    with caplog.at_level("INFO", logger="zgcm_model"):
        for _ in range(2):
            kernel(query, key, value, window=2, documents=None)
    assert kernel.name == "auto (banded)"
    assert [r.message for r in caplog.records] == ["attention kernel 'banded' was picked for device cpu"]


def test_segments_are_found_row_by_row():
    assert find_segments(torch.tensor([[3, 3, 1], [1, 1, 1]])) == [2, 1, 3]
    assert find_segments(torch.tensor([[3, 1, 3], [1, 1, 1]])) is None


def test_bad_input(refuses):
    query, key, value = tensors(1, 4, 4, 3, 2)
    with pytest.raises(ValueError, match="query heads=3"):
        attention(query, key, value)
    query, key, value = tensors(1, 4, 4, 2, 2)
    with pytest.raises(ValueError, match="window=0"):
        attention(query, key, value, window=0)
    with refuses("keys=2 is below queries=4"):
        attention(query, key[:, :2], value[:, :2])
    with refuses("document_ids has 3"):
        attention(query, key, value, document_ids=torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="kernel='fast'"):
        attention(query, key, value, kernel="fast")
