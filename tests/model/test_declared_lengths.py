"""Schemes that depend on the declared length, at the last token of two rows that declare different
lengths: the original length, and one beyond."""

import math
from dataclasses import replace

import pytest
import torch

from model import TokenPositions
from model.position.table import StretchedTables
from tests.model.alone import bias_of, put, scheme_of
from tests.model.zoo import H, settings_of

L0 = 16
LENGTHS = (L0, 57)
LAST = L0 - 1
ROWS = replace(TokenPositions.plain(L0), lengths=LENGTHS)


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
    assert tables._table.cache_info().currsize == 16
