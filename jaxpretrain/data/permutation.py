"""A stateless permutation of n numbers: where index i goes is computed in O(1), nothing is stored.

A Feistel network over the smallest power of two >= n, walked along its cycle until it lands below n (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002, sections 3 and 4).
"""

import numpy as np

_ROUNDS = 12  # with 8, permutations of five or six numbers are visibly uneven over the epochs
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, a bijection that scatters (the finaliser of splitmix64: Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):  # wrapping is meant; NumPy warns for scalars
        x = np.asarray(x, np.uint64) + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def fold(*words: int | np.ndarray) -> np.ndarray:
    """A uint64 key from integers (or arrays of them, broadcast); order and number of the words matter."""
    key = mix(np.uint64(len(words)))
    for word in words:
        key = mix(key ^ mix(np.asarray(word, np.int64).astype(np.uint64)))
    return key


def permute(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where the permutation of range(n) that `key` names sends `index`.

    index: int64, 0 <= index < n. key: uint64 from `fold`, one or one per index. n up to 2^62.
    """
    index = np.asarray(index, np.int64)
    assert 1 <= n <= 1 << 62, n
    out = index.astype(np.uint64)
    keys = np.broadcast_to(np.asarray(key, np.uint64), out.shape)
    bits = max(2, (n - 1).bit_length())
    todo = np.arange(out.size)
    out, keys = out.ravel(), keys.ravel()
    while todo.size:
        out[todo] = _feistel(out[todo], bits, keys[todo])
        todo = todo[out[todo] >= n]
    return out.reshape(index.shape).astype(np.int64)


def _feistel(x: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A keyed bijection of [0, 2^bits); halves of unequal width take turns."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = x & low_mask, x >> low_bits
    for i in range(_ROUNDS):
        round_keys = mix(keys + np.uint64(i))
        if i % 2 == 0:
            high = high ^ (mix(low ^ round_keys) & high_mask)
        else:
            low = low ^ (mix(high ^ round_keys) & low_mask)
    return (high << low_bits) | low
