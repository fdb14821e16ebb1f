"""A stateless permutation of n numbers: where index i goes is computed in O(1), nothing is stored.

A Feistel network over pairs (high, low) of range(a) x range(b), a b >= n, whose halves take turns being shifted by a
hash of the other; a result beyond n goes through it again (Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002, sections 3 and 4). With a and b near sqrt(n) hardly any does.
"""

import functools
import math

import numpy as np

_ROUNDS = 12  # with 8, permutations of few numbers are visibly uneven over the epochs
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """A bijection of 64 bits that scatters (the finaliser of splitmix64: Steele, Lea and Flood 2014)."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@functools.lru_cache(1 << 16)
def fold(*words: int) -> int:
    """A key of 64 bits from integers; their order and number matter."""
    key = _mix(len(words))
    for word in words:
        key = _mix(key ^ _mix(word & _MASK))
    return key


_ROUND_KEYS = np.array([fold(i) for i in range(_ROUNDS)], np.uint64)


def scatter(x: np.ndarray) -> np.ndarray:
    """uint64 -> uint64: a hash whose upper 32 bits are good. Overwrites `x`."""
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    return x


def permute(index: np.ndarray, n: int, key: int | np.ndarray) -> np.ndarray:
    """Where the permutation of range(n) that `key` names sends `index`.

    index: int64 [N], 0 <= index < n. key: from `fold`, one, or one per index as uint64 [N]. n up to 2^62.
    """
    assert 1 <= n <= 1 << 62, n
    a = math.isqrt(n - 1) + 1
    a, b = np.uint64(a), np.uint64(-(-n // a))
    out = index.astype(np.uint64)
    key = np.asarray(key, np.uint64)
    todo = slice(None)
    while True:
        out[todo] = _feistel(out[todo], a, b, key if key.ndim == 0 else key[todo])
        todo = np.flatnonzero(out >= n)
        if not todo.size:
            return out.astype(np.int64)


def _feistel(x: np.ndarray, a: np.uint64, b: np.uint64, key: np.ndarray) -> np.ndarray:
    """A keyed bijection of range(a * b)."""
    high, low = np.divmod(x, b)
    for i, round_key in enumerate(_ROUND_KEYS):
        # Of the hash the upper half: below 2^32, so that the sum does not wrap.
        if i % 2 == 0:
            high = (high + (scatter(low ^ key ^ round_key) >> np.uint64(32))) % a
        else:
            low = (low + (scatter(high ^ key ^ round_key) >> np.uint64(32))) % b
    return high * b + low
