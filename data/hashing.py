"""Hashes of numbers and token ranges, vectorized, and canonical hashes of JSON values."""

import functools
import hashlib
import json
from typing import Any

import numpy as np

from data.sampling.random_draws import STEP, mixed

_FACTOR = 0x5851F42D4C957F2D  # odd, hence invertible modulo 2**64
_INVERSE = pow(_FACTOR, -1, 1 << 64)


def powers(base: int, n: int) -> np.ndarray:
    """base**0 ... base**(n-1) modulo 2**64."""
    out = np.full(n, base, dtype=np.uint64)
    out[0] = 1
    return np.multiply.accumulate(out)


_power_table = functools.cache(powers)


def range_hashes(
    values: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
) -> np.ndarray:
    """Polynomial hash of each range values[start:stop] of uint64 (n,), independent of its offset:
    uint64."""
    table = 1 << max(10, (len(values) - 1).bit_length())  # a table for each power of two
    prefix = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values * _power_table(_FACTOR, table)[: len(values)], out=prefix[1:])
    sums = prefix[stops] - prefix[starts]
    sums = sums * _power_table(_INVERSE, table)[starts]
    return mixed(sums + STEP)


def canonical_hash(value: Any) -> str:
    """sha256, hex, of a JSON value. It does not depend on the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
