import numpy as np
import pytest

from jaxpretrain.data.permutation import fold, permute


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 64, 1000, 1024, 1025, 10007])
def test_is_a_permutation(n):
    """Mutation seen to fail: no cycle walking (`if not todo.size:` -> `if True:`)."""
    for seed in (0, 1, -3):
        out = permute(np.arange(n), n, fold(seed, 0))
        assert out.dtype == np.int64
        assert np.array_equal(np.sort(out), np.arange(n))


def test_epochs_and_seeds_differ_and_keys_broadcast():
    """Mutation seen to fail: `fold` that ignores its last word."""
    n = 1000
    orders = [permute(np.arange(n), n, fold(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)]
    for a in range(4):
        for b in range(a):
            assert (orders[a] == orders[b]).mean() < 0.02
    epochs = np.arange(n) % 2
    mixed = permute(np.arange(n), n, np.array([fold(0, 0), fold(0, 1)], np.uint64)[epochs])
    assert np.array_equal(mixed, np.where(epochs, orders[1], orders[0]))


def test_beyond_32_bits():
    n = (1 << 40) + 12345
    index = np.concatenate([np.arange(1000), n - 1 - np.arange(1000), np.arange(1000) * 7_654_321])
    out = permute(index, n, fold(5))
    assert out.min() >= 0 and out.max() < n
    assert len(np.unique(out)) == len(np.unique(index))
    assert out.max() > 0.9 * n and abs(out.mean() / n - 0.5) < 0.05


@pytest.mark.parametrize("n", [2, 3, 5, 6, 13])
def test_uniform(n):
    """Every index goes everywhere equally often over the epochs: chi-square within 6 sigma.

    Mutation seen to fail: `_ROUNDS = 4`.
    """
    epochs = 6000
    counts = np.zeros((n, n))
    keys = np.array([fold(0, epoch) for epoch in range(epochs)], np.uint64)
    for index in range(n):
        out = permute(np.full(epochs, index), n, keys)
        counts[index] = np.bincount(out, minlength=n)
    expected = epochs / n
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = n * (n - 1)
    assert chi2 < freedom + 6 * np.sqrt(2 * freedom)


def test_neighbours_are_scattered():
    n = 100_000
    out = permute(np.arange(n), n, fold(0))
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(n), out)[0, 1]) < 0.02


def test_golden_values():
    """The order of a run's data is part of the run: a change of these numbers breaks the resuming of every one."""
    assert permute(np.arange(8), 1000, fold(0, 0, 0)).tolist() == GOLDEN


GOLDEN = [64, 893, 334, 599, 643, 237, 1, 324]
