"""Random numbers as a pure function of names and indices, without state and without a library's
generator.

A run may be resumed years later or on another number of processes, so the draws must not depend on
the numpy version or on the order of calls.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

STEP = np.uint64(0x9E3779B97F4A7C15)  # the increment of splitmix64
ROUNDS = 6
# sets up to this size are shuffled completely; from larger sets, distinct numbers are sampled
SORTED = 4096


def mixed(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finalizer, which mixes the bits of uint64 values."""
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash64(text: str) -> int:
    """The first 64 bits of a text's SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def key_of(*names: int | str) -> np.uint64:
    """Hash names to a 64-bit key."""
    return np.uint64(hash64(repr(names)))


def bits(key: np.uint64, *indices: np.ndarray) -> np.ndarray:
    """Return 64 random bits for each tuple of indices (non-negative arrays that broadcast): uint64.

    Applies splitmix64 once per index: the current state is the seed, and the index is the offset in
    its stream.
    """
    state = np.asarray(key, dtype=np.uint64)[None]
    for index in indices:
        steps = index.astype(np.uint64) + np.uint64(1)
        state = mixed(state + steps * STEP)
    return state


def fractions(random: np.ndarray) -> np.ndarray:
    """Map random bits to uniform numbers in [0, 1): float64, multiples of 2^−53."""
    return (random >> np.uint64(11)) * 2.0**-53


def below(random: np.ndarray, n: np.ndarray | int) -> np.ndarray:
    """Map random bits to uniform integers in 0 ... n−1: int64. The bias is below n / 2^64."""
    return (random % np.asarray(n, dtype=np.uint64)).astype(np.int64)


def permuted(index: np.ndarray, n: int, *key: int | str) -> np.ndarray:
    """Apply the permutation of 0 ... n-1 that `key` selects to each index. index: int64, any
    shape."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    words = [int.from_bytes(digest[4 * r : 4 * r + 8], "little") for r in range(ROUNDS)]
    return shuffled(index, n, [np.uint64(word) for word in words])


def shuffled(index: np.ndarray, n: int, keys: Sequence[np.ndarray | np.uint64]) -> np.ndarray:
    """Apply permutations of 0 ... n-1 to indices. Equal keys select the same permutation. Returns
    int64.

    Uses a Feistel network on the next even number of bits and repeats it until the result is below
    n (cycle walking). It needs no table, so memory does not depend on n.

    Args:
        index: int64, any shape.
        n: size of the permutations.
        keys: ROUNDS numbers or arrays of uint64 that broadcast to the shape of `index`.
    """
    bit_count = max(n - 1, 1).bit_length()
    half = (bit_count + 1) // 2
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    keys = [np.broadcast_to(key, index.shape) for key in keys]

    def once(x: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        left = x >> shift
        right = x & low
        for round_key in keys:
            scrambled = mixed(right ^ round_key) & low
            left, right = right, left ^ scrambled
        return (left << shift) | right

    out = once(index.astype(np.uint64), keys)
    outside = out >= n
    while outside.any():
        out[outside] = once(out[outside], [key[outside] for key in keys])
        outside = out >= n
    return out.astype(np.int64)


class NamedDraws:
    """Random integers as a function of a key and of the name of each draw."""

    def __init__(self, *key: int | str):
        self.key = key

    def bits(self, what: int | str, count: int) -> np.ndarray:
        """(count,) random bits."""
        return bits(key_of(*self.key, what), np.arange(count))

    def one(self, what: int | str, n: int) -> int:
        """An integer in 0 ... n−1."""
        return self.below(what, 1, n)[0]

    def below(self, what: int | str, count: int, n: int) -> list[int]:
        """`count` integers in 0 ... n−1. The first ones do not depend on `count`."""
        return below(self.bits(what, count), n).tolist()

    def distinct(self, what: str, count: int, n: int) -> list[int]:
        """`count` distinct integers in 0 ... n−1. The first ones do not depend on `count`."""
        if n <= SORTED:
            return np.argsort(self.bits(what, n), kind="stable")[:count].tolist()
        wanted = count
        drawn: list[int] = []
        while len(drawn) < count:
            wanted *= 2
            drawn = list(dict.fromkeys(self.below(what, wanted, n)))
        return drawn[:count]
