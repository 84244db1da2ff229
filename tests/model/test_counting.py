"""Integer, binary and sinusoidal additions to the embedding, against Python's own and hand-computed
cases."""

from __future__ import annotations

import math

import pytest
import torch

from model import ModelSettings, TokenPositions, Transformer
from tests.model.alone import added, doubles, made
from tests.model.zoo import V, close, ids, refusal


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_integers_add_position_to_every_feature(scale):
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    scheme = made("integer", 5, scale=scale)
    positions = TokenPositions.plain(3, offset=7)
    out = scheme.embed(x, scheme.tables(positions, torch.float64), positions)
    close(out, x + scale * doubles(range(7, 10))[None, :, None], atol=1e-14)
    assert not list(scheme.parameters())


def test_integers_along_a_learned_direction():
    scheme = made("integer", 6, scale=0.5, direction="learned")
    (direction,) = scheme.parameters()
    assert direction.shape == (6,) and direction.std() > 0.3
    out = added(scheme, TokenPositions.plain(4, offset=2))
    for row, n in zip(out[0], range(2, 6), strict=True):
        close(row, n * 0.5 * direction, atol=1e-15)
    big = made("integer", 4000, direction="learned")
    big.initialize(torch.Generator().manual_seed(0), 0.02)
    assert float(next(big.parameters()).detach().std()) == pytest.approx(0.02, rel=0.05)


def test_current_fraction_is_relative_to_declared_length():
    scheme = made("unit_interval", 3, denominator="current")
    assert scheme.depends_on_length
    close(
        added(scheme, TokenPositions.plain(4, offset=6, length=25)),
        doubles([[[n / 25] * 3 for n in range(6, 10)]]),
        atol=0,
    )
    ragged = TokenPositions.left_padded([5, 2], 5, lengths=[7, 30])
    expected = doubles([[0, 1 / 7, 2 / 7, 3 / 7, 4 / 7], [0, 0, 0, 0, 1 / 30]])
    close(added(scheme, ragged, rows=2), expected[..., None].expand(2, 5, 3), atol=1e-16)


@pytest.mark.parametrize("dim", [5, 9, 13])
def test_binary_matches_python_bin(dim):
    scheme = made("binary", dim)
    count = min(2**dim, 700)
    expected = doubles([[int(c) for c in bin(n)[2:].zfill(dim)] for n in range(count)])
    close(added(scheme, TokenPositions.plain(count))[0], expected, atol=0)
    assert scheme.limit == 2**dim and not scheme.supports_fractions
    # What training on 16 positions sees; the next power of two sets a feature that was always zero.
    assert (expected[:16, : dim - 4] == 0).all() and expected[16, dim - 5] == 1


def test_binary_is_limited_by_width():
    model = Transformer(ModelSettings(dim=4, heads=2, layers=1, position={"name": "binary"}), V, 10)
    with torch.no_grad():
        # past the trained length the higher features serve
        model(ids(1, 16), TokenPositions.plain(16))
        for positions in (TokenPositions.plain(17), TokenPositions.plain(3, offset=14)):
            tokens = ids(1, positions.order.shape[1])
            text = refusal(lambda p=positions, t=tokens: model(t, p))
            assert "'binary'" in text and "offset + T = 17" in text and "16 tokens" in text


@pytest.mark.parametrize(
    ("dim", "base"), [(7, None), (1, None), (7, 10_000.0), (12, 50.0), (1, 9.0)]
)
def test_sines_at_doubling_or_geometric_wavelengths(dim, base):
    out = added(made("sine", dim, base=base), TokenPositions.plain(5, offset=300))[0]
    for row, n in zip(out, range(300, 305), strict=True):
        if base is None:
            expected = [math.sin(n / 2**i) for i in range(dim)]
        else:
            expected = [math.sin(n / math.pow(base, i / (dim - 1) if i else 0)) for i in range(dim)]
        close(row, doubles(expected), atol=1e-12)
