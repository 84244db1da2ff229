"""Chance as a pure function of names and indices: no state, no library's generator, no order of asking.

Runs are resumed over years and shared among any number of processes, so nothing here may change with a
version of numpy or with who asks first.
"""

import hashlib

import numpy as np

from data.duplicates import mixed

ROUNDS = 6
_STEP = np.uint64(0x9E3779B97F4A7C15)


def key_of(*names: int | str) -> np.uint64:
    """64 bits that stand for these names."""
    return np.uint64(int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:8], "little"))


def bits(key: np.uint64, *indices: np.ndarray) -> np.ndarray:
    """64 random bits for each tuple of indices (arrays that broadcast, non-negative): uint64.

    splitmix64 once for each index: the state reached so far is the seed, the index the place in its stream.
    """
    state = np.asarray(key, dtype=np.uint64)[None]
    for index in indices:
        state = mixed(state + (index.astype(np.uint64) + np.uint64(1)) * _STEP)
    return state


def fractions(random: np.ndarray) -> np.ndarray:
    """Random bits as numbers evenly spread over [0, 1): float64, multiples of 2^−53."""
    return (random >> np.uint64(11)) * 2.0**-53


def below(random: np.ndarray, n: np.ndarray | int) -> np.ndarray:
    """Random bits as integers evenly spread over 0 ... n−1: int64. The bias is below n / 2^64."""
    return (random % np.asarray(n, dtype=np.uint64)).astype(np.int64)


def permuted(index: np.ndarray, n: int, *key: int | str) -> np.ndarray:
    """Where a permutation of 0 ... n-1, chosen by `key`, sends each index. index: int64, any shape."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    words = [int.from_bytes(digest[4 * r : 4 * r + 8].ljust(8, b"\0"), "little") for r in range(ROUNDS)]
    return shuffled(index, n, [np.asarray(word, dtype=np.uint64) for word in words])


def shuffled(index: np.ndarray, n: int, keys: list[np.ndarray]) -> np.ndarray:
    """Where permutations of 0 ... n-1 send each index; equal keys, equal permutation. int64.

    A Feistel network on the next even number of bits, walked until it lands below n: needs no table, so
    billions of windows cost nothing.

    Args:
        index: int64, any shape.
        n: size of the permutations.
        keys: ROUNDS arrays of uint64 that broadcast to the shape of `index`.
    """
    half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    low, shift = np.uint64((1 << half) - 1), np.uint64(half)
    keys = [np.broadcast_to(key, index.shape) for key in keys]

    def once(x: np.ndarray, here: list[np.ndarray]) -> np.ndarray:
        left, right = x >> shift, x & low
        for round_key in here:
            left, right = right, left ^ (mixed(right ^ round_key) & low)
        return (left << shift) | right

    out = once(index.astype(np.uint64), keys)
    outside = out >= n
    while outside.any():
        out[outside] = once(out[outside], [key[outside] for key in keys])
        outside = out >= n
    return out.astype(np.int64)
