"""Dynamic masking: which tokens of a row are predicted, and what the model reads in their place, by hashes alone.

Shapes: B rows, T seq_len, M targets of a row at most.
"""

import numpy as np

from jaxpretrain.data.permutation import scatter
from jaxpretrain.data.tokenizer import MaskingTokens

_MASKED, _RANDOM = 0.8, 0.1  # of the tokens to predict; the rest stays as it is (Devlin et al. 2019, section 3.1)


class Masking:
    """Masks batches of rows that begin with a special token and may end in padding."""

    def __init__(self, tokens: MaskingTokens, vocab_size: int, fraction: float, num_targets: int):
        """`fraction` of a row's words are to be predicted, `num_targets` (M) at most."""
        self._tokens, self._fraction, self._num_targets = tokens, fraction, num_targets
        self._words = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), np.array(tokens.special, np.int32))
        self._is_word = np.zeros(vocab_size, bool)
        self._is_word[self._words] = True

    def __call__(self, batch: dict[str, np.ndarray], index: np.ndarray, key: int) -> dict[str, np.ndarray]:
        """`tokens`, `segment_ids` [B, T] -> the same with some tokens masked, `positions` and `targets` [B, M].

        Of a row with n words, `fraction * n` are to be predicted, rounded up or down at random so that the mean is
        exact. `index`, int64 [B], numbers the rows and with `key` decides all.
        """
        tokens, (num_rows, seq_len) = batch["tokens"].copy(), batch["tokens"].shape
        # Two numbers of 32 good bits for each token, and two for the row.
        starts = scatter(index.astype(np.uint64) ^ np.uint64(key))
        hashes = scatter(starts[:, None] + np.arange(2 * seq_len + 2, dtype=np.uint64)) >> np.uint64(32)
        order, action, rounding = hashes[:, :seq_len], hashes[:, seq_len : 2 * seq_len], hashes[:, -1]

        is_word = self._is_word[tokens] & (batch["segment_ids"] > 0)
        count = np.floor(self._fraction * is_word.sum(axis=1) + rounding / 2.0**32).astype(np.int64)
        # The words with the smallest hashes; ties, one in four billion, go to the earlier one.
        ranked = np.where(is_word, order, np.uint64(1 << 33))
        positions = np.argsort(ranked, axis=1, kind="stable")[:, : self._num_targets]
        is_target = np.arange(self._num_targets) < np.minimum(count, is_word.sum(axis=1))[:, None]

        rows = np.arange(num_rows)[:, None]
        original = tokens[rows, positions]
        chance = action[rows, positions] / 2.0**32
        word = self._words[(scatter(action[rows, positions] + np.uint64(1)) >> np.uint64(32)) % len(self._words)]
        read = np.where(chance < _MASKED, self._tokens.mask, np.where(chance < _MASKED + _RANDOM, word, original))
        tokens[rows, positions] = np.where(is_target, read, original)
        return batch | {
            "tokens": tokens,
            "positions": np.where(is_target, positions, 0).astype(np.int32),
            "targets": np.where(is_target, original, -1).astype(np.int32),
        }
