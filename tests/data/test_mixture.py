import numpy as np
import pytest

from jaxpretrain.data.mixture import Mixture


def _names(weights):
    return [str(k) for k in range(len(weights))]


@pytest.mark.parametrize("weights", [[1.0], [1, 1], [0.7, 0.3], [1, 2, 3], [0.001, 1, 0.333, 7], [5, 1, 1, 1, 1]])
def test_each_source_in_order_and_in_proportion(weights):
    """Each source's rows come once each, in order, and at any time in proportion to its weight.

    Mutation seen to fail: `local[undecided] = index[undecided]`.
    """
    index = np.arange(20_000)
    source, local = Mixture(_names(weights), weights).assign(index)
    for k, weight in enumerate(weights):
        mine = source == k
        assert np.array_equal(local[mine], np.arange(mine.sum()))
        share = weight / sum(weights)
        assert np.abs(np.cumsum(mine) - share * (index + 1)).max() < len(weights)


def test_stateless():
    """Mutation seen to fail: `rest = rest - before` dropped."""
    mixture = Mixture(_names([3, 2, 1]), [3, 2, 1])
    source, local = mixture.assign(np.arange(1000))
    for start in (1, 17, 500):
        s, j = mixture.assign(np.arange(start, start + 13))
        assert np.array_equal(s, source[start : start + 13]) and np.array_equal(j, local[start : start + 13])


def test_far_out():
    """10^12 rows on, shares are still exact (no floats in it)."""
    start = 10**12
    source, local = Mixture(_names([0.9, 0.1]), [0.9, 0.1]).assign(np.arange(start, start + 1000))
    assert (source == 1).sum() == 100
    assert local[source == 1][0] == start // 10
    assert np.array_equal(np.diff(local[source == 0]), np.ones(899))


def test_vanishing_weight_is_refused():
    with pytest.raises(ValueError, match=r"data\.mixture\.1\.weight=1e-09"):
        Mixture(_names([1, 2]), [1.0, 1e-9])
