"""Schedules are pure functions of progress."""

import math

import pytest

from zgcm_optim import schedule


def test_warm_up_gives_the_first_update_a_rate() -> None:
    assert [schedule.constant(k, 1.0, 4) for k in (1, 2, 4, 5, 900)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert schedule.constant(1, 2e-4) == 2e-4
    assert schedule.constant(0, 1.0, 4) == 0.0


def test_cosine() -> None:
    rate = [schedule.cosine(k, 1.0, 10, 110, floor=0.1) for k in (5, 10, 60, 110, 500)]
    assert rate == pytest.approx([0.5, 1.0, 0.55, 0.1, 0.1])
    assert schedule.cosine(3, 1.0, 3, 3) == 1.0
    assert schedule.cosine(4, 1.0, 3, 3) == 0.0


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_warmup_stable_decay(shape: str, middle: float) -> None:
    rate = [schedule.warmup_stable_decay(k, 1.0, 10, 100, 20, shape=shape) for k in (5, 10, 80, 90, 100, 101)]
    assert rate == pytest.approx([0.5, 1.0, 1.0, middle, 0.0, 0.0])


def test_updates_and_tokens_give_the_same_rate() -> None:
    for update in (1, 17, 60, 99):
        by_update = schedule.warmup_stable_decay(update, 3e-4, 10, 100, 30, floor=3e-5)
        by_token = schedule.warmup_stable_decay(
            update * 4096, 3e-4, 10 * 4096, 100 * 4096, 30 * 4096, floor=3e-5
        )
        assert by_update == pytest.approx(by_token)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="peak"):
        schedule.constant(1, -1.0)
    with pytest.raises(ValueError, match="progress"):
        schedule.constant(math.nan, 1.0)
    with pytest.raises(ValueError, match="total"):
        schedule.cosine(1, 1.0, 20, 10)
    with pytest.raises(ValueError, match="floor"):
        schedule.cosine(1, 1.0, 2, 10, floor=2.0)
    with pytest.raises(ValueError, match="total"):
        schedule.warmup_stable_decay(1, 1.0, 60, 100, 50)
    with pytest.raises(ValueError, match="shape"):
        schedule.warmup_stable_decay(1, 1.0, 6, 100, 50, shape="exp")
