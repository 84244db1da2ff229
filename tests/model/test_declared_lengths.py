"""Schemes that depend on the declared length, at the last token of two rows that declare different
lengths: the original length, and one beyond."""

import math
from dataclasses import replace

import pytest
import torch

from model import TokenPositions
from model.position.table import StretchedTables
from tests.model.alone import added, bias_of, put, scheme_of
from tests.model.zoo import H, settings_of

L0 = 16
LENGTHS = (L0, 57)
LAST = L0 - 1
ROWS = replace(TokenPositions.plain(L0), lengths=LENGTHS)
BASE = 50.0
THETAS = [BASE ** (-k / 5) for k in range(5)]  # of the five pairs of a head


def yarn(s: float) -> list[float]:
    """With the ramp in rotations within L0, from 1.5 to 0.2."""
    shares = [min(max((L0 * f / (2 * math.pi) - 0.2) / 1.3, 0), 1) for f in THETAS]
    frequencies = [g * f + (1 - g) * f / s for f, g in zip(THETAS, shares, strict=True)]
    return [(0.1 * math.log(s) + 1) * math.cos(LAST * f) for f in frequencies]


def cosines(s: float) -> list[float]:
    """Of base b·s^(r/(r − 2))."""
    return [math.cos(LAST * (BASE * s ** (10 / 8)) ** (-k / 5)) for k in range(5)]


DIVISORS = [1.0, 1.5, 2.5, 4.0, 6.0]
# Settings, and cos of the last token of a row with stretch s.
ROTATIONS = {
    "linear": ({"scaling": {"name": "linear"}}, lambda s: [math.cos(LAST * f / s) for f in THETAS]),
    "ntk": ({"scaling": {"name": "ntk"}}, cosines),
    "dynamic": (
        {"scaling": {"name": "dynamic", "factor": 2.5}},
        lambda s: cosines(2.5 * s - 1.5),
    ),
    "yarn": (
        {"scaling": {"name": "yarn", "ramp": "wavelength", "beta_fast": 1.5, "beta_slow": 0.2}},
        yarn,
    ),
    "longrope": (
        {"scaling": {"name": "longrope", "long_factor": DIVISORS}},
        lambda s: [
            math.sqrt(1 + math.log(s) / math.log(L0)) * math.cos(LAST * f / (d if s > 1 else 1))
            for f, d in zip(THETAS, DIVISORS, strict=True)
        ],
    ),
    "dual_chunk": (
        {"remap": {"name": "dual_chunk", "chunk": 15, "local": 3, "mscale": True}},
        lambda s: [(0.05 * math.log(s) + 1) * math.cos(LAST % 12 * f) for f in THETAS],
    ),
}


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations(name):
    keys, expected = ROTATIONS[name]
    cos = scheme_of("rope", theta=BASE, **keys).tables(ROWS, torch.float64)[0]
    for row, length in enumerate(LENGTHS):
        assert cos[row, -1].tolist() == pytest.approx(expected(length / L0), abs=1e-12)


def test_leaky_rerope():
    """Keys beyond w = 6 are compressed by (L − w) / (L0 − w)."""
    remap = {"name": "leaky_rerope", "factor": "auto", "distance": 6}
    cos = scheme_of("rope", theta=BASE, remap=remap).tables(ROWS, torch.float64)[4]
    for row, length in enumerate(LENGTHS):
        expected = [math.cos(LAST * 10 / (length - 6) * f) for f in THETAS]
        assert cos[row, -1].tolist() == pytest.approx(expected, abs=1e-12)


def test_embeddings():
    """Fractions of the length, stretched sinusoids, and a table that is stretched over the length."""
    fraction = added(scheme_of("unit_interval", denominator="current"), ROWS, 2)
    wave = added(scheme_of("sinusoidal", theta=BASE, stretch="auto"), ROWS, 2)
    learned = scheme_of("learned", max_length=8, extend="interpolate")
    table = learned.weight.detach()
    rows = added(learned, ROWS, 2).detach()
    for row, length in enumerate(LENGTHS):
        assert fraction[row, -1, 0].item() == pytest.approx(LAST / length)
        assert wave[row, -1, 0].item() == pytest.approx(math.sin(LAST * L0 / length))
        index = LAST * 7 / (length - 1)
        low = math.floor(index)
        share = index - low
        expected = table[low] * (1 - share) + table[min(low + 1, 7)] * share
        torch.testing.assert_close(rows[row, -1], expected)


# Settings, parameters of head 0, and its bias. Of 6 heads, the first 4 have ALiBi's slopes of 4.
BIASES = {
    "alibi": ({}, {}, lambda d: -d / 4),
    "sandwich": ({"dims": 4}, {}, lambda d: 6 / 8 * (math.cos(d) + math.cos(d / 100))),
    "kerple": ({}, {"r1": 1.5, "r2": 0.3}, lambda d: -1.5 * math.log(1 + 0.3 * d)),
}


@pytest.mark.parametrize("name", BIASES)
def test_biases(name):
    keys, parameters, expected = BIASES[name]
    values = {key: torch.full((H,), value) for key, value in parameters.items()}
    bias = bias_of(put(scheme_of(name, stretch="auto", **keys), **values), ROWS, rows=2)
    for row, length in enumerate(LENGTHS):
        found = bias[row, 0, -1, 0].item()
        assert found == pytest.approx(expected(LAST * L0 / length), abs=1e-6)


def test_temperature():
    position = settings_of({"name": "none", "temperature": {"name": "stretch"}}).position
    factors = position.temperature.query_factors(ROWS, None, L0, torch.float64)
    assert factors[:, 0, -1].tolist() == pytest.approx([1, 1 + 0.412 * math.log(57 / 16)])


def test_a_bounded_number_of_tables_is_kept():
    """Of passes of one stretch, and of two rows of which one has a stretch of before."""
    tables = StretchedTables(lambda stretch: lambda position: (position * stretch,))
    for stretch in range(1, 40):
        asked = [stretch - 1, stretch] if stretch % 2 and stretch > 1 else [stretch]
        (found,) = tables.look_up(TokenPositions.plain(3), asked, torch.float64)
        assert found.tolist() == [[0, each, 2 * each] for each in asked]
        assert len(tables._tables) <= 16
