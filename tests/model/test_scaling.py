"""Frequencies and rotations of RoPE against transformers, float64 re-implementations of released
code, and closed forms. No table of ours is used on both sides of a comparison."""

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from model import TokenPositions
from model.position.scaling import plain_frequencies
from model.position.schemes.rope import Rope, apply_rotation, rotation_factors
from model.position.table import StretchedTables
from tests.files import table
from tests.model.alone import doubles, normal, scheme_of
from tests.model.zoo import close

THETA = 10_000.0
every_layout = pytest.mark.parametrize("layout", ["half", "interleaved"])


def rope(dim: int, length: int = 512, name: str = "rope", **keys) -> Rope:
    """The scheme with heads of `dim` features, trained at `length`."""
    return scheme_of(name, features=dim, train=length, **keys)


def spectrum(dim: int, length: int = 512, at: int | None = None, **keys) -> Tensor:
    """Frequencies for a sequence of `at` tokens."""
    scheme = rope(dim, length, **keys)
    return scheme.frequencies(scheme.stretch(at or length))[0]


def huggingface(
    dim: int, length: int, seq_len: int | None = None, **parameters
) -> tuple[Tensor, float]:
    config = LlamaConfig(
        hidden_size=3 * dim,
        num_attention_heads=3,
        head_dim=dim,
        max_position_embeddings=length,
        rope_parameters={
            "rope_theta": THETA,
            "original_max_position_embeddings": length,
            **parameters,
        },
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len)


def same(ours: Tensor, theirs: Tensor) -> None:
    """Theirs are float32."""
    torch.testing.assert_close(ours.float(), theirs, rtol=2e-6, atol=0)


SCALINGS = table("model/scalings.yaml")


@pytest.mark.parametrize(("name", "keys", "sizes"), SCALINGS)
def test_scaled_frequencies_and_amplitudes(name, keys, sizes):
    for dim, length in sizes:
        scheme = rope(dim, length, scaling={"name": name, **keys})
        for at in (3, length, length + 1, 4 * length):
            ours, amplitude = scheme.frequencies(scheme.stretch(at))
            theirs, factor = huggingface(dim, length, seq_len=at, rope_type=name, **keys)
            same(ours, theirs)
            assert amplitude == pytest.approx(factor, rel=1e-12)
        assert scheme.depends_on_length == (name in ("dynamic", "longrope"))


EXPECTED = table("model/expected_frequencies.yaml")


@pytest.mark.parametrize("kind", EXPECTED)
def test_frequencies_of_the_tests_of_transformers(kind):
    scaling, length, expected = EXPECTED[kind]
    found = spectrum(128, 2048, at=length, scaling=scaling).tolist()
    assert found == pytest.approx(expected, rel=5.1e-5, abs=0)


@every_layout
def test_rotations_against_huggingface(layout):
    t = 7
    dim = 12
    offset = 5
    x = normal(2, 3, t, dim)
    frequencies = THETA ** (-torch.arange(0, dim, 2).double() / dim)
    angles = (torch.arange(t) + offset)[:, None] * frequencies
    angles = angles[None].expand(2, -1, -1)
    tables = rope(dim, layout=layout).tables(TokenPositions.plain(t, offset=offset), torch.float64)
    ours = apply_rotation(x, rotation_factors(*tables, layout), layout)
    if layout == "half":
        wide = torch.cat([angles, angles], dim=-1)
        theirs, _ = llama_rotary(x, x, wide.cos(), wide.sin())
    else:
        theirs = gptj_rotary(x.transpose(1, 2), angles.sin(), angles.cos()).transpose(1, 2)
    close(ours, theirs, atol=1e-13)


def test_longrope_first_positions_are_unscaled():
    scaling = {"name": "longrope", "first": 3, "long_factor": [1.2, 2, 3, 4, 5]}
    cos, sin = rope(10, 16, scaling=scaling).tables(TokenPositions.plain(40), torch.float64)
    n = torch.arange(40).double()[:, None]
    divisors = torch.where(n < 3, 1.0, doubles(scaling["long_factor"]))
    beyond = doubles(math.sqrt(1 + math.log(40 / 16) / math.log(16)))
    amplitude = torch.where(n < 3, 1.0, beyond)
    angles = n * THETA ** -(torch.arange(5).double() / 5) / divisors
    close(cos[0], amplitude * angles.cos(), atol=1e-13)
    close(sin[0], amplitude * angles.sin(), atol=1e-13)


@pytest.mark.parametrize("share", [0.75, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dim", [64, 10, 28])
def test_p_rope_matches_huggingface_proportional(dim, share):
    theirs, _ = huggingface(dim, 512, rope_type="proportional", partial_rotary_factor=share)
    same(spectrum(dim, name="p_rope", share=share), theirs)


@pytest.mark.parametrize(
    ("dim", "length"),
    [
        (64, 2048),
        (128, 512),
        (10, 100),
    ],
)
def test_he_xu_is_rope_interpolated_by_two_n_over_pi(dim, length):
    factor = 2 * length / math.pi
    ours = spectrum(dim, 333, name="he_xu", max_length=length)
    same(ours, huggingface(dim, 512, rope_type="linear", factor=factor)[0])
    close(spectrum(dim, length, name="he_xu"), ours, atol=0)  # N is the trained length
    assert length != 2048 or float(1 / ours[0]) == pytest.approx(1303.797, abs=5e-4)


@pytest.mark.parametrize(
    ("dim", "length", "s"),
    [
        (64, 512, 4.0),
        (128, 1024, 8.0),
        (16, 256, 3.0),
    ],
)
def test_ntk_by_parts_matches_released_code(dim, length, s):
    """LlamaPartNTKScaledRotaryEmbedding of jquesnelle/yarn, retyped for one pair with float64."""

    def pair_with(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    def ramp(fast: float, slow: float, k: int) -> float:
        low = max(math.floor(pair_with(fast)), 0)
        high = min(math.ceil(pair_with(slow)), dim - 1)
        return 1 - min(max((k - low) / (high - low), 0), 1)

    expected = []
    mixtures = set()
    for k in range(dim // 2):
        base = THETA ** (-2 * k / dim)
        ntk = (THETA * s ** (dim / (dim - 2))) ** (-2 * k / dim)
        m = ramp(1.25, 0.75, k)
        n = ramp(16, 2, k)
        expected.append((base / s * (1 - m) + ntk * m) * (1 - n) + base * n)
        mixtures.add((m == 1, n == 1, n == 0))
    ours = spectrum(dim, length, scaling={"name": "by_parts", "factor": s})
    torch.testing.assert_close(ours, doubles(expected), rtol=1e-12, atol=0)
    assert len(mixtures) >= 3  # some kept, some mixed, some divided


@pytest.mark.parametrize("factor", [4.0, "auto"])
@pytest.mark.parametrize("at", [3, 512, 513, 2048])
def test_formulas_that_huggingface_does_not_have(at, factor):
    """NTK, Peng et al. 2023, eq. 16; the ramp of eq. 17 and 18, in rotations within L0."""
    s = max(1, at / 512) if factor == "auto" else factor
    plain = [THETA ** (-2 * k / 64) for k in range(32)]
    ntk = [(THETA * s ** (64 / 62)) ** (-2 * k / 64) for k in range(32)]
    scheme = rope(64, scaling={"name": "ntk", "factor": factor})
    found, amplitude = scheme.frequencies(scheme.stretch(at))
    close(found, doubles(ntk), atol=1e-15)
    assert amplitude == 1
    shares = [min(max((512 * f / (2 * math.pi) - 1) / (32 - 1), 0), 1) for f in plain]
    ramp = [(1 - g) * f / s + g * f for f, g in zip(plain, shares, strict=True)]
    scheme = rope(64, scaling={"name": "yarn", "factor": factor, "ramp": "wavelength"})
    found, amplitude = scheme.frequencies(scheme.stretch(at))
    close(found, doubles(ramp), atol=1e-15)
    assert amplitude == pytest.approx(0.1 * math.log(s) + 1, rel=1e-12)
    assert len({0.0, 1.0, *shares}) > 4  # kept, mixed and divided


@pytest.mark.parametrize(
    "scaling",
    [
        {"name": "none"},
        {"name": "by_parts", "factor": 4.0},
        {"name": "clipped"},
        {"name": "drop"},
    ],
    ids=lambda scaling: scaling["name"],
)
def test_only_yarn_and_longrope_scale_the_logits(scaling):
    scheme = rope(64, scaling=scaling)
    _, amplitude = scheme.frequencies(scheme.stretch(2048))
    assert amplitude == 1


def test_p_rope_reversed_and_cut_by_wavelength():
    full = [THETA ** (-2 * k / 64) for k in range(32)]
    last = doubles([0.0] * 8 + full[8:])
    close(spectrum(64, name="p_rope", reversed=True), last, atol=1e-16)
    within = doubles([t if 2 * math.pi / t <= 2 * 512 else 0.0 for t in full])
    assert 0 < (within > 0).sum() < 24
    cut = spectrum(64, name="p_rope", share=1.0, max_wavelength=2.0)
    close(cut, within, atol=1e-16)


def test_resonance_rounds_wavelengths():
    wavelengths = 2 * math.pi / spectrum(64, resonance=True)
    assert wavelengths[:6].round(decimals=9).tolist() == [6, 8, 11, 15, 20, 26]  # Wang et al. 2024
    plain = 2 * math.pi / plain_frequencies(THETA, 64)
    close(wavelengths, plain.round(), atol=1e-9)


def test_a_bounded_number_of_tables_is_kept():
    """Of passes of one stretch, and of two rows of which one has a stretch of before."""
    tables = StretchedTables(lambda stretch: lambda position: (position * stretch,))
    for stretch in range(1, 40):
        asked = [stretch - 1, stretch] if stretch % 2 and stretch > 1 else [stretch]
        (found,) = tables.look_up(TokenPositions.plain(3), asked, torch.float64)
        assert found.tolist() == [[0, each, 2 * each] for each in asked]
    assert tables._table.cache_info().currsize == 16
