"""The n-gram baselines against the formulas written out with dictionaries, and against closed forms."""

import collections
import math

import numpy as np
import pytest

from jaxpretrain.data import ngrams


def plain_entropies(train, valid, vocab_size):
    """The docstring's formulas, one token at a time."""
    unigrams, bigrams = collections.Counter(train), collections.Counter(zip(train, train[1:], strict=False))
    histories = collections.Counter(train[:-1])

    def p1(w):
        return (unigrams[w] + 1) / (len(train) + vocab_size)

    def p2(w, h):
        kinds = sum(1 for first, _ in bigrams if first == h)
        if kinds == 0:
            return p1(w)
        return (bigrams[h, w] + kinds * p1(w)) / (histories[h] + kinds)

    pairs = list(zip(valid, valid[1:], strict=False))
    return -sum(math.log(p1(w)) for _, w in pairs) / len(pairs), -sum(math.log(p2(w, h)) for h, w in pairs) / len(pairs)


@pytest.mark.parametrize("chunk", [3, 7, 1000])
def test_equals_the_formulas(monkeypatch, chunk):
    """Mutations seen to fail: no +1 in the unigram; `kinds` replaced by 1; the last token of a chunk left out of it
    (`start + _CHUNK`), which loses the pairs between chunks."""
    monkeypatch.setattr(ngrams, "_CHUNK", chunk)
    rng = np.random.default_rng(0)
    train = rng.integers(0, 5, 200).astype(np.uint16)
    valid = rng.integers(0, 8, 50).astype(np.uint16)  # 5, 6, 7 are new, also as histories
    expected = plain_entropies(train.tolist(), valid.tolist(), 9)
    assert ngrams.held_out_entropies(train, valid, 9) == pytest.approx(expected, rel=1e-12)


def test_a_markov_chain_reaches_its_entropy_rate():
    """Each state goes on by 1 with probability 3/4, by 2 else: ln 5 without history, the rate of the coin with it."""
    steps = np.random.default_rng(1).choice([1, 2], p=[0.75, 0.25], size=400_000)
    tokens = np.cumsum(steps) % 5
    unigram, bigram = ngrams.held_out_entropies(tokens[:300_000], tokens[300_000:], 5)
    assert unigram == pytest.approx(math.log(5), abs=2e-3)
    assert bigram == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), abs=5e-3)


def test_probabilities_sum_to_one():
    """Over all next tokens, for a history that was seen and for one that was not."""
    train = np.array([0, 1, 0, 2, 0, 1])
    for history in (0, 3):
        total = 0.0
        for token in range(4):
            unigram, bigram = ngrams.held_out_entropies(train, np.array([history, token]), 4)
            total += math.exp(-bigram)
        assert total == pytest.approx(1)


def test_counts_at_most_so_many_tokens(monkeypatch):
    monkeypatch.setattr(ngrams, "MAX_TRAIN_TOKENS", 4)
    valid = np.array([0, 1, 0])
    rest = np.array([1, 1, 1, 1])
    head = np.array([0, 1, 1, 0])
    assert ngrams.held_out_entropies(np.concatenate([head, rest]), valid, 2) == ngrams.held_out_entropies(
        head, valid, 2
    )


def test_mistakes():
    two = np.array([0, 1])
    with pytest.raises(ValueError, match="eval.ngrams=True with model.vocab_size=50304"):
        ngrams.held_out_entropies(two, two, 50304)
    with pytest.raises(ValueError, match="1 to train on"):
        ngrams.held_out_entropies(two[:1], two, 2)
    with pytest.raises(ValueError, match="token id 7 is outside the vocabulary: model.vocab_size=5"):
        ngrams.held_out_entropies(two, np.array([0, 7]), 5)
