"""Unigram and bigram entropies: what a model of counts reaches, the baseline that a trained model must beat."""

import numpy as np

MAX_VOCAB_SIZE = 4096  # the bigram table is dense, vocab_size^2 counts of 8 bytes
MAX_TRAIN_TOKENS = 50_000_000
_CHUNK = 4_000_000


def held_out_entropies(train_tokens: np.ndarray, valid_tokens: np.ndarray, vocab_size: int) -> tuple[float, float]:
    """Cross-entropies (unigram, bigram) of `valid_tokens` under models counted on `train_tokens`, in nats per token.

    N tokens are counted, the first MAX_TRAIN_TOKENS at most. c are counts, V = vocab_size, d(h) the number of
    different tokens seen after h:

        unigram  p(w)     = (c(w) + 1) / (N + V)                       add-one
        bigram   p(w | h) = (c(h w) + d(h) p(w)) / (c(h .) + d(h))     Witten-Bell interpolation with the unigram

    (Witten and Bell 1991, method C; the recursive form of Chen and Goodman 1998, section 2.6.) After an h never
    seen the bigram model is the unigram model. Both are evaluated on the same targets, `valid_tokens[1:]`; both
    arrays are 1-D streams of tokens, pairs across document boundaries included.

    Raises ValueError for a vocabulary above MAX_VOCAB_SIZE, a token outside it, or too few tokens.
    """
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(
            f"eval.ngrams=True with model.vocab_size={vocab_size}: the table of pairs would be too large, the most is "
            f"{MAX_VOCAB_SIZE}; set eval.ngrams=False"
        )
    if len(train_tokens) < 2 or len(valid_tokens) < 2:
        raise ValueError(
            f"n-gram entropies need at least 2 tokens in each split; there are {len(train_tokens)} to train on and "
            f"{len(valid_tokens)} to validate on"
        )
    unigrams = np.zeros(vocab_size, np.int64)
    bigrams = np.zeros(vocab_size * vocab_size, np.int64)
    train_tokens = train_tokens[:MAX_TRAIN_TOKENS]
    for start in range(0, len(train_tokens), _CHUNK):
        # One token more than the chunk, so that no pair is lost; as int64, or the pair's code would overflow.
        chunk = np.asarray(train_tokens[start : start + _CHUNK + 1], np.int64)
        _check(chunk, vocab_size)
        unigrams += np.bincount(chunk[:_CHUNK], minlength=vocab_size)
        bigrams += np.bincount(chunk[:-1] * vocab_size + chunk[1:], minlength=len(bigrams))
    bigrams = bigrams.reshape(vocab_size, vocab_size)
    unigram_probability = (unigrams + 1) / (len(train_tokens) + vocab_size)
    seen_after = bigrams.sum(axis=1)
    kinds_after = np.count_nonzero(bigrams, axis=1)

    unigram_nats = bigram_nats = 0.0
    for start in range(0, len(valid_tokens) - 1, _CHUNK):
        chunk = np.asarray(valid_tokens[start : start + _CHUNK + 1], np.int64)
        _check(chunk, vocab_size)
        history, token = chunk[:-1], chunk[1:]
        p_unigram = unigram_probability[token]
        kinds, seen = kinds_after[history], seen_after[history]
        p_bigram = np.where(
            seen > 0, (bigrams[history, token] + kinds * p_unigram) / np.maximum(seen + kinds, 1), p_unigram
        )
        unigram_nats -= np.log(p_unigram).sum()
        bigram_nats -= np.log(p_bigram).sum()
    num_targets = len(valid_tokens) - 1
    return float(unigram_nats / num_targets), float(bigram_nats / num_targets)


def _check(tokens: np.ndarray, vocab_size: int) -> None:
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary: model.vocab_size={vocab_size}")
