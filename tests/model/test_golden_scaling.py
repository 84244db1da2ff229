"""Frequency scaling against transformers, float64 re-implementations of released code, and closed
forms."""

from __future__ import annotations

import math

import pytest
import torch

from model import TokenPositions
from model.position import SCHEMES, HeadGeometry
from model.position.scaling import plain_frequencies
from tests.model.test_golden_positions import THETA, huggingface, rope
from tests.model.zoo import T, build, close, ids


def scheme(name: str, dim: int, length: int = 512, **keys):
    """The scheme alone, in a model trained at `length`."""
    settings, position = SCHEMES[name]
    return position(settings.model_validate(keys), HeadGeometry(dim * 3, 3, dim, length, length, 3))


def spectrum(name: str, dim: int, length: int = 512, at: int | None = None, **keys) -> torch.Tensor:
    made = scheme(name, dim, length, **keys)
    return made.frequencies(made.stretch(at or length))[0]


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize(("dim", "length"), [(64, 512), (10, 256)])
def test_dynamic_ntk_at_declared_length_matches_huggingface(dim, length, factor):
    made = rope(dim, length, scaling={"name": "dynamic", "factor": factor})
    for at in (3, length, length + 1, 4 * length):
        found, amplitude = made.frequencies(made.stretch(at))
        expected, one = huggingface(dim, length, seq_len=at, rope_type="dynamic", factor=factor)
        torch.testing.assert_close(found.float(), expected, rtol=2e-6, atol=0)
        assert amplitude == one == 1.0
    assert made.depends_on_length


@pytest.mark.parametrize("mscales", [(1.0, 1.0), (0.7, 1.0), (1.0, 0.4)])
def test_yarn_mscale(mscales):
    keys = {"name": "yarn", "factor": 8.0, "mscale": mscales[0], "mscale_all_dim": mscales[1]}
    _, amplitude = rope(64, 512, scaling=keys).frequencies(8.0)
    theirs = {key: value for key, value in keys.items() if key != "name"}
    assert amplitude == pytest.approx(
        huggingface(64, 512, rope_type="yarn", **theirs)[1], rel=1e-12
    )


def test_deepseek_logit_scale_is_an_attention_factor():
    """cos and sin times m(mscale)/m(mscale_all_dim), logits times m(mscale_all_dim)²: a² is
    m(mscale)²."""
    s = 40.0
    mscale = 0.8
    mscale_all = 1.3
    own = (0.1 * mscale * math.log(s) + 1) / (0.1 * mscale_all * math.log(s) + 1)
    logits = own**2 * (0.1 * mscale_all * math.log(s) + 1) ** 2
    keys = {"name": "yarn", "factor": s, "attention_factor": 0.1 * mscale * math.log(s) + 1}
    cos, sin = rope(64, 512, scaling=keys).tables(TokenPositions.plain(4), torch.float64)
    close(cos.square() + sin.square(), torch.full_like(cos, logits), atol=1e-12)


@pytest.mark.parametrize("attention_factor", [None, 1.3])
@pytest.mark.parametrize("at", [100, 512, 513, 4096])
def test_longrope_by_declared_length(at, attention_factor):
    short = [1 + 0.01 * k for k in range(32)]
    long = [1 + 0.4 * k for k in range(32)]
    keys = {
        "factor": 4.0,
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention_factor,
    }
    made = rope(64, 512, scaling={"name": "longrope", **keys})
    found, amplitude = made.frequencies(made.stretch(at))
    keys = {key: value for key, value in keys.items() if value is not None}
    expected, factor = huggingface(64, 512, seq_len=at, rope_type="longrope", **keys)
    torch.testing.assert_close(found.float(), expected, rtol=2e-6, atol=0)
    assert amplitude == pytest.approx(factor, rel=1e-12) and made.depends_on_length


FIRST = {"name": "longrope", "first": 3, "long_factor": [1.2, 2, 3, 4, 5]}


def test_longrope_first_positions_are_unscaled():
    cos, sin = rope(10, 16, scaling=FIRST).tables(TokenPositions.plain(40), torch.float64)
    amplitude = math.sqrt(1 + math.log(40 / 16) / math.log(16))
    for n in (0, 1, 2, 3, 4, 39):
        for k in range(5):
            divisor, a = (1, 1) if n < 3 else (FIRST["long_factor"][k], amplitude)
            angle = n * THETA ** (-k / 5) / divisor
            assert float(cos[0, n, k]) == pytest.approx(a * math.cos(angle), abs=1e-13)
            assert float(sin[0, n, k]) == pytest.approx(a * math.sin(angle), abs=1e-13)


@pytest.mark.parametrize("share", [0.75, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dim", [64, 10, 28])
def test_p_rope_matches_huggingface_proportional(dim, share):
    expected, _ = huggingface(dim, 512, rope_type="proportional", partial_rotary_factor=share)
    found = spectrum("p_rope", dim, share=share)
    torch.testing.assert_close(found.float(), expected, rtol=5e-7, atol=0)
    if (dim, share) == (64, 0.75):
        assert int((found > 0).sum()) == 24 and len(found) == 32


def test_p_rope_reversed_and_cut_by_wavelength():
    full = [THETA ** (-2 * k / 64) for k in range(32)]
    last = [0.0] * 8 + full[8:]
    close(
        spectrum("p_rope", 64, reversed=True), torch.tensor(last, dtype=torch.float64), atol=1e-16
    )
    within = [t if 2 * math.pi / t <= 2 * 512 else 0.0 for t in full]
    assert 0 < sum(t > 0 for t in within) < 24
    found = spectrum("p_rope", 64, share=1.0, max_wavelength=2.0)
    close(found, torch.tensor(within, dtype=torch.float64), atol=1e-16)


@pytest.mark.parametrize(("dim", "length"), [(64, 2048), (128, 512), (10, 100)])
def test_he_xu_is_rope_interpolated_by_two_n_over_pi(dim, length):
    factor = 2 * length / math.pi
    expected, _ = huggingface(dim, 512, rope_type="linear", factor=factor)
    found = spectrum("he_xu", dim, 333, max_length=length)
    assert float((found - expected.double()).abs().max()) <= 1.2e-7 / factor
    close(spectrum("he_xu", dim, length), found, atol=0)  # N is the trained length
    if length == 2048:
        assert float((found - expected.double()).abs().max()) < 6e-11
        assert float(1 / found[0]) == pytest.approx(1303.797, abs=5e-4)


@pytest.mark.parametrize(("dim", "length", "s"), [(64, 512, 4.0), (128, 1024, 8.0), (16, 256, 3.0)])
def test_ntk_by_parts_matches_released_code(dim, length, s):
    """LlamaPartNTKScaledRotaryEmbedding of jquesnelle/yarn, retyped for one pair with float64."""

    def ramp(fast: float, slow: float, k: int) -> float:
        def pair(turns: float) -> float:
            return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(THETA))

        low = max(math.floor(pair(fast)), 0)
        high = min(math.ceil(pair(slow)), dim - 1)
        return 1 - min(max((k - low) / (high - low), 0), 1)

    found = spectrum("rope", dim, length, scaling={"name": "by_parts", "factor": s})
    kinds = set()
    for k in range(dim // 2):
        base = THETA ** (-2 * k / dim)
        ntk = (THETA * s ** (dim / (dim - 2))) ** (-2 * k / dim)
        m = ramp(1.25, 0.75, k)
        n = ramp(16, 2, k)
        expected = (base / s * (1 - m) + ntk * m) * (1 - n) + base * n
        assert float(found[k]) == pytest.approx(expected, rel=1e-12)
        kinds.add((m == 1, n == 1, n == 0))
    assert len(kinds) >= 3  # some kept, some mixed, some divided


def test_resonance_rounds_wavelengths():
    found = 2 * math.pi / spectrum("rope", 64, resonance=True)
    assert [round(float(w), 9) for w in found[:6]] == [6, 8, 11, 15, 20, 26]  # Wang et al. 2024
    close(found, found.round(), atol=1e-9)
    plain = 2 * math.pi / plain_frequencies(THETA, 64)
    assert (found - plain).abs().max() <= 0.5 + 1e-9


def test_resonance_comes_after_scaling():
    theirs, factor = huggingface(64, 512, rope_type="yarn", factor=4.0)
    made = rope(64, 512, scaling={"name": "yarn", "factor": 4.0}, resonance=True)
    found, amplitude = made.frequencies(4.0)
    expected = 2 * math.pi / (2 * math.pi / theirs).round()
    torch.testing.assert_close(found.float(), expected, rtol=2e-6, atol=0)
    assert amplitude == pytest.approx(factor, rel=1e-12)


@torch.no_grad()
def test_dropped_positions_equal_nope():
    tokens = ids(2, T)
    positions = TokenPositions.plain(T)
    nope = build("none")
    trained = build("rope")
    for name in ("rope", "p_rope", "he_xu"):
        dropped = build({"name": name, "scaling": {"name": "drop"}, "resonance": name == "rope"})
        dropped.load_state_dict(trained.state_dict())
        close(dropped(tokens, positions), nope(tokens, positions), atol=0)
    assert (trained(tokens, positions) - nope(tokens, positions)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"name": "dynamic", "factor": 2.0}, "dynamic s=7 (matched)"),
        ({"name": "by_parts"}, "by_parts s=4 (matched)"),
        ({"name": "yarn", "factor": 16}, "yarn s=16 (fixed)"),
        ({"name": "longrope", "factor": 8, "long_factor": [1] * 5}, "longrope s=4 (matched)"),
        ({"name": "drop"}, "drop"),
    ],
)
def test_describe_scaling_for_a_length(scaling, words):
    assert rope(10, scaling=scaling).settings.scaling.describe(400, 100) == words
