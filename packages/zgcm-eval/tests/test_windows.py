import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zgcm_eval.windows import Batching, Window, cut_windows, pad_batch, plan_batches, score_windows

PREFIX = 1000


@given(length=st.integers(0, 60), context=st.integers(1, 17), overlap=st.integers(0, 16))
@settings(deadline=None, max_examples=200)
def test_every_token_is_scored_exactly_once(length, context, overlap):
    if overlap >= context:
        with pytest.raises(ValueError, match="overlap"):
            cut_windows(0, list(range(length)), PREFIX, context, overlap)
        return
    windows = cut_windows(0, list(range(length)), PREFIX, context, overlap)
    scored = [token_id for window in windows for token_id in window.token_ids[window.scored_from :]]
    assert scored == list(range(length))
    for window in windows:
        assert len(window.token_ids) <= context + 1
        assert window.token_ids[0] == PREFIX
        assert window.token_ids.count(PREFIX) == 1
    for window in windows[1:]:
        assert window.scored_from == 1 + overlap


def test_the_drawing_of_the_module_is_true():
    windows = cut_windows(5, range(7), PREFIX, 4, 2)
    assert windows == [
        Window(5, (PREFIX, 0, 1, 2, 3), 1),
        Window(5, (PREFIX, 2, 3, 4, 5), 3),
        Window(5, (PREFIX, 4, 5, 6), 3),
    ]


def test_a_context_of_nothing_is_refused():
    with pytest.raises(ValueError, match="context is 0"):
        cut_windows(0, [1, 2], PREFIX, 0, 0)
    with pytest.raises(ValueError, match="tokens_per_batch is 0"):
        Batching(tokens_per_batch=0)


def test_batches_hold_each_window_once_within_the_budget():
    windows = [Window(n, tuple(range(1 + n % 7)), 1) for n in range(50)]
    batches = plan_batches(windows, 20)
    assert sorted(index for batch in batches for index in batch) == list(range(50))
    for batch in batches:
        width = max(len(windows[index].token_ids) for index in batch)
        assert len(batch) == 1 or width * len(batch) <= 20


def test_padding_is_at_the_right_and_never_scored():
    token_ids, scored = pad_batch([Window(0, (9, 1, 2, 3), 2), Window(1, (9, 4), 1)], pad_id=9)
    assert token_ids.tolist() == [[9, 1, 2, 3], [9, 4, 9, 9]]
    assert scored.tolist() == [[False, True, True], [True, False, False]]


def test_figures_come_back_in_the_order_of_the_windows():
    windows = [Window(n, tuple(range(2 + n % 5)), 1) for n in range(23)]
    steps = []
    figures = score_windows(
        windows,
        lambda token_ids, scored: scored.sum(1, keepdim=True).double(),
        0,
        Batching(12),
        lambda done, total: steps.append((done, total)),
    )
    assert np.array_equal(figures[:, 0], [1 + n % 5 for n in range(23)])
    assert steps[-1][0] == steps[-1][1] == len(steps)
    assert score_windows([], lambda token_ids, scored: torch.zeros(0, 1), 0, Batching()).shape[0] == 0
