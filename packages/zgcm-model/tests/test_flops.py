import pytest

from zgcm_model import ModelConfig, flops_per_token
from zgcm_model.flops import mean_visible_keys


@pytest.mark.parametrize(
    ("length", "exact", "all_full"),
    [(4096, 41.219, 43.770), (16384, 42.731, 53.433), (65536, 48.771, 92.088), (262144, 72.931, 246.707)],
)
def test_published_lengths(length, exact, all_full):
    flops = flops_per_token(ModelConfig.preset("zgcm-1-7b"), length)
    assert flops.total / 1e9 == pytest.approx(exact, abs=6e-4)
    assert flops.total_if_all_full / 1e9 == pytest.approx(all_full, abs=6e-4)


@pytest.mark.parametrize(("length", "window"), [(5, None), (5, 3), (3, 5), (128, 128), (200, 1)])
def test_visible_keys_by_counting(length, window):
    counted = sum(min(i + 1, window or length) for i in range(length)) / length
    assert mean_visible_keys(length, window) == pytest.approx(counted)


def test_doubling_length_doubles_window_layers_and_quadruples_global_ones():
    local = ModelConfig.preset("zgcm-1-7b", global_every=33)
    full = ModelConfig.preset("zgcm-1-7b", global_every=1)
    for config, factor in ((local, 2.0), (full, 4.0)):
        work = [flops_per_token(config, t).attention * t for t in (65536, 131072)]
        assert work[1] / work[0] == pytest.approx(factor, rel=2e-3)
    config = ModelConfig.preset("zgcm-1-7b")
    assert flops_per_token(config, 4096).gate == 6 * 4096 * 4096 * 27


def test_bad_length():
    with pytest.raises(ValueError, match="sequence_length=0"):
        flops_per_token(ModelConfig.preset("zgcm-1-tiny"), 0)
