"""Frequencies, rotations, slopes and sinusoids against other implementations and closed forms.

The references are transformers (a test dependency only) and formulas written from the papers with `math`
alone. No table of ours is used on both sides of a comparison.
"""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere_rotary
from transformers.models.flaubert.modeling_flaubert import create_sinusoidal_embeddings
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotary
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from model import TokenPositions
from model.position import HeadGeometry
from model.position.rotation import rotate
from model.position.scaling import plain_frequencies
from model.position.schemes.absolute import Learned, LearnedSettings, Sinusoidal, SinusoidalSettings
from model.position.schemes.alibi import alibi_slopes
from model.position.schemes.rope import Rope, RopeSettings
from tests.model.zoo import close

THETA = 10_000.0


def rope(dim: int, length: int = 512, **keys) -> Rope:
    """The scheme alone; C and H of its model are of no account."""
    return Rope(RopeSettings(**keys), HeadGeometry(dim * 3, 3, dim, length, length, 3))


def spectrum(dim: int, length: int, stretch: float = 1.0, **scaling) -> torch.Tensor:
    return rope(dim, length, scaling=scaling).frequencies(stretch)[0]


def huggingface(
    dim: int, length: int, seq_len: int | None = None, **parameters
) -> tuple[torch.Tensor, float]:
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


@pytest.mark.parametrize("dim", [10, 64, 128])
def test_plain_frequencies(dim):
    config = LlamaConfig(hidden_size=3 * dim, num_attention_heads=3, head_dim=dim)
    theirs, amplitude = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    assert amplitude == 1.0
    torch.testing.assert_close(plain_frequencies(THETA, dim).float(), theirs, rtol=3e-7, atol=0)
    by_hand = [1 / THETA ** (2 * k / dim) for k in range(dim // 2)]
    close(plain_frequencies(THETA, dim), torch.tensor(by_hand, dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"name": "linear", "factor": 3.0}, {"rope_type": "linear", "factor": 3.0}),
        ({"name": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}),
        (
            {"name": "yarn", "factor": 4.0, "truncate": False},
            {"rope_type": "yarn", "factor": 4.0, "truncate": False},
        ),
        (
            {
                "name": "yarn",
                "factor": 16.0,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "attention_factor": 1.7,
            },
            {
                "rope_type": "yarn",
                "factor": 16.0,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "attention_factor": 1.7,
            },
        ),
        (
            {"name": "llama3", "factor": 8.0},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
    ],
    ids=["linear", "yarn", "yarn-not-truncated", "yarn-betas", "llama3"],
)
@pytest.mark.parametrize(("dim", "length"), [(64, 512), (128, 4096), (80, 2048), (10, 256)])
def test_scaled_frequencies_and_amplitudes(ours, theirs, dim, length):
    found, amplitude = rope(dim, length, scaling=ours).frequencies(ours["factor"])
    expected, factor = huggingface(dim, length, **theirs)
    torch.testing.assert_close(found.float(), expected, rtol=2e-6, atol=0)
    assert amplitude == pytest.approx(factor, rel=1e-12)


def test_yarn_truncation_changes_frequencies():
    pair = [spectrum(64, 512, 4.0, name="yarn", factor=4.0, truncate=t) for t in (True, False)]
    assert 0.05 < ((pair[0] - pair[1]).abs() / pair[1]).max() < 0.3


def test_yarn_amplitude_multiplies_both_cos_and_sin():
    scheme = rope(64, 512, scaling={"name": "yarn", "factor": 4.0})
    cos, sin = scheme.tables(TokenPositions.plain(9), torch.float64)
    close(
        cos.square() + sin.square(), torch.full_like(cos, (0.1 * math.log(4) + 1) ** 2), atol=1e-12
    )


@pytest.mark.parametrize("stretch", [1.0, 2.0, 7.3])
@pytest.mark.parametrize(("dim", "fraction"), [(64, 1.0), (128, 0.5), (10, 1.0)])
def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest_by_exactly_s(stretch, dim, fraction):
    scheme = rope(dim, 512, fraction=fraction, scaling={"name": "ntk", "factor": stretch})
    scaled, amplitude = scheme.frequencies(stretch)
    plain = plain_frequencies(THETA, scheme.dims)
    assert amplitude == 1.0 and scaled[0] == plain[0] == 1.0
    assert float(plain[-1] / scaled[-1]) == pytest.approx(stretch, rel=1e-13)
    ratios = (plain / scaled).log().diff()  # the base change is geometric in between
    close(ratios, ratios.mean().expand_as(ratios), atol=1e-13)


@pytest.mark.parametrize(
    ("dim", "length", "stretch", "apart"),
    [(64, 512, 4.0, 0.77), (128, 4096, 8.0, 1.30), (128, 2048, 16.0, 2.08)],
)
def test_the_two_yarn_ramps_differ_as_published(dim, length, stretch, apart):
    by_index = spectrum(dim, length, stretch, name="yarn", factor=stretch)
    by_turns = spectrum(dim, length, stretch, name="yarn", factor=stretch, ramp="wavelength")
    assert float(((by_index - by_turns).abs() / by_turns).max()) == pytest.approx(apart, abs=0.006)


@pytest.mark.parametrize(("dim", "length", "s"), [(64, 512, 4.0), (128, 4096, 8.0)])
def test_wavelength_ramp_matches_paper(dim, length, s):
    """Peng et al. 2023: r = L0/λ, γ(r) between α = 1 and β = 32, θ' = (1 − γ) θ/s + γ θ."""
    found = spectrum(dim, length, s, name="yarn", factor=s, ramp="wavelength")
    for k in range(dim // 2):
        theta = THETA ** (-2 * k / dim)
        turns = length / (2 * math.pi / theta)
        gamma = 0 if turns < 1 else 1 if turns > 32 else (turns - 1) / 31
        assert float(found[k]) == pytest.approx((1 - gamma) * theta / s + gamma * theta, rel=1e-12)


def test_every_scaling_at_stretch_one_is_plain_rope():
    for name in ("linear", "ntk", "yarn", "llama3"):
        found, amplitude = rope(64, 512, scaling={"name": name}).frequencies(1.0)
        close(found, plain_frequencies(THETA, 64), atol=1e-15)
        assert amplitude == 1.0


@pytest.mark.parametrize("rule", ["linear", "ntk", "yarn", "llama3"])
def test_scaled_frequencies_are_between_plain_and_plain_over_s(rule):
    plain = plain_frequencies(THETA, 64)
    scaled = spectrum(64, 256, 6.0, name=rule, factor=6.0)
    assert (scaled <= plain * (1 + 1e-12)).all() and (scaled >= plain / 6 * (1 - 1e-12)).all()
    assert (scaled.diff() < 0).all()
    if rule != "linear":
        assert scaled[0] == plain[0] and float(plain[-1] / scaled[-1]) == pytest.approx(
            6.0, rel=1e-12
        )


def turned(x: torch.Tensor, position: int, layout: str, **keys) -> torch.Tensor:
    """x (D,) turned to a position."""
    scheme = rope(len(x), 512, layout=layout, **keys)
    where = TokenPositions.plain(1, offset=position, length=512)
    return rotate(x[None, None, None], *scheme.tables(where, torch.float64), layout)[0, 0, 0]


def test_rotation_of_two_features_by_hand():
    """θ_0 = 1 whatever the base: (3, 1) at position 2 turns anticlockwise by 2 radians."""
    x = torch.tensor([3.0, 1.0], dtype=torch.float64)
    # of 2 radians
    cos = -0.4161468365471424
    sin = 0.9092974268256817
    expected = torch.tensor([3 * cos - sin, 3 * sin + cos], dtype=torch.float64)
    close(
        expected,
        torch.tensor([-2.157737936467109, 2.3117454439299027], dtype=torch.float64),
        atol=1e-14,
    )
    for layout in ("half", "interleaved"):
        close(turned(x, 2, layout), expected, atol=1e-14)


def test_rotation_of_four_features_by_hand():
    """Base 16, D 4: θ = 1, 1/4. At position 2 the pairs turn by 2 and by 0.5 radians."""
    x = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    c2 = math.cos(2)
    s2 = math.sin(2)
    c5 = math.cos(0.5)
    s5 = math.sin(0.5)
    half = [c2, -2 * s5, s2, 2 * c5]  # pairs (x0, x2) = (1, 0) and (x1, x3) = (0, 2)
    interleaved = [c2, s2, -2 * s5, 2 * c5]  # pairs (x0, x1) = (1, 0) and (x2, x3) = (0, 2)
    for layout, expected in (("half", half), ("interleaved", interleaved)):
        found = turned(x, 2, layout, theta=16.0)
        close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotations_against_huggingface(layout):
    b = 2
    h = 3
    t = 7
    dim = 12
    offset = 5
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(b, h, t, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    angles = (torch.arange(t) + offset)[:, None] / THETA ** (torch.arange(0, dim, 2).double() / dim)
    angles = angles[None].expand(b, -1, -1)
    cos, sin = rope(dim, layout=layout).tables(
        TokenPositions.plain(t, offset=offset), torch.float64
    )
    found = rotate(q, cos, sin, layout), rotate(k, cos, sin, layout)
    if layout == "half":
        wide = torch.cat([angles, angles], dim=-1)
        expected = llama_rotary(q, k, wide.cos(), wide.sin())
        close(found[0], expected[0], atol=1e-13)
        close(found[1], expected[1], atol=1e-13)
        return
    wide = angles.repeat_interleave(2, dim=-1)
    # Cohere's rotation computes in float32.
    expected = cohere_rotary(q.float(), k.float(), wide.cos().float(), wide.sin().float())
    close(found[0].float(), expected[0], atol=2e-6)
    close(found[1].float(), expected[1], atol=2e-6)
    gptj = gptj_rotary(q.transpose(1, 2), angles.sin(), angles.cos()).transpose(1, 2)
    close(found[0], gptj, atol=1e-13)


def test_layouts_are_permutations_of_each_other():
    dim = 12
    x = torch.randn(dim, dtype=torch.float64)
    order = [*range(0, dim, 2), *range(1, dim, 2)]  # interleaved → half
    close(turned(x[order], 9, "half"), turned(x, 9, "interleaved")[order], atol=1e-13)
    assert (turned(x, 9, "half") - turned(x, 9, "interleaved")).abs().max() > 0.1


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotations_preserve_norms_and_depend_on_differences(layout):
    dim = 8
    eye = torch.eye(8, dtype=torch.float64)
    matrix = {
        n: torch.stack([turned(row, n, layout) for row in eye], dim=1) for n in (0, 3, 7, 20, 23, 4)
    }
    for n in matrix:
        close(matrix[n].T @ matrix[n], eye, atol=1e-13)
    close(matrix[0], eye, atol=0)
    close(matrix[3].T @ matrix[7], matrix[4], atol=1e-13)  # R(n)ᵀ R(m) = R(m − n)
    close(matrix[3].T @ matrix[23], matrix[20], atol=1e-13)
    close(matrix[7].T @ matrix[3], matrix[4].T, atol=1e-13)
    assert dim == len(eye)


def test_partial_rotation_leaves_other_features_unchanged():
    x = torch.randn(10, dtype=torch.float64)
    for layout in ("half", "interleaved"):
        out = turned(x, 6, layout, fraction=0.5)  # int(10 · 0.5) = 5 features, 2 pairs
        close(out[4:], x[4:], atol=0)
        close(out[:4], turned(x[:4], 6, layout), atol=1e-13)


def test_rope_long_range_decay():
    """mean_j |Σ_{k<j} e^{imθ_k}|, the bound of Su et al. 2021 section 3.4.3."""
    published = {0: 32.5, 1: 31.5382, 2: 28.956, 5: 20.8454, 10: 17.9541, 20: 15.2424}
    published |= {50: 12.6295, 100: 10.2273, 128: 9.2729, 256: 6.5431}
    cos, sin = rope(128).tables(TokenPositions.plain(257), torch.float64)
    sums = torch.complex(cos[0], sin[0]).cumsum(-1).abs().mean(-1)
    for distance, value in published.items():
        assert float(sums[distance]) == pytest.approx(value, abs=6e-5)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16, 20])
def test_alibi_slopes(heads):
    slopes = alibi_slopes(heads)
    torch.testing.assert_close(slopes.float(), _get_alibi_slopes(heads, "cpu"), rtol=1e-6, atol=0)
    t = 5
    mpt = build_mpt_alibi_tensor(heads, t)[:, 0]  # (H, T): for the last query, slope · −distance
    ours = -slopes[:, None] * torch.arange(t - 1, -1, -1)[None]
    torch.testing.assert_close(ours.float(), mpt, rtol=1e-6, atol=0)


def test_alibi_slopes_by_hand():
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    # Six heads: those of four, then the first and third of eight.
    assert alibi_slopes(6).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


@pytest.mark.parametrize("dim", [10, 28, 64])
def test_sinusoids_against_huggingface(dim):
    n = 40
    geometry = HeadGeometry(dim, 2, dim // 2, 16, 16, 2)
    ours = {
        layout: Sinusoidal(SinusoidalSettings(layout=layout), geometry).tables(
            TokenPositions.plain(n), torch.float64
        )[0][0]
        for layout in ("interleaved", "half")
    }
    flaubert = create_sinusoidal_embeddings(n, dim, torch.zeros(n, dim))
    close(ours["interleaved"].float(), flaubert, atol=1e-6)
    # theirs has float32 angles
    close(ours["half"].float(), create_sinusoidal_positions(n, dim), atol=1e-5)


def test_sinusoid_dot_products_depend_on_distance():
    dim = 28
    rows = Sinusoidal(SinusoidalSettings(), HeadGeometry(dim, 2, 14, 16, 16, 2)).tables(
        TokenPositions.plain(60), torch.float64
    )[0][0]
    theta = [THETA ** (-2 * k / dim) for k in range(dim // 2)]
    for n, m in ((0, 0), (5, 2), (2, 5), (59, 1), (33, 20)):
        expected = sum(math.cos(t * (n - m)) for t in theta)
        assert float(rows[n] @ rows[m]) == pytest.approx(expected, abs=1e-12)


def test_sinusoids_by_hand():
    """Four features, base 10000: sin and cos of n and of n/100."""
    rows = Sinusoidal(SinusoidalSettings(), HeadGeometry(4, 2, 2, 16, 16, 2)).tables(
        TokenPositions.plain(4), torch.float64
    )[0][0]
    expected = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]
    close(rows[3], torch.tensor(expected, dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("scale_tokens", [True, False])
def test_sinusoids_are_added_to_tokens_times_the_root_of_the_width(scale_tokens):
    scheme = Sinusoidal(
        SinusoidalSettings(scale_tokens=scale_tokens), HeadGeometry(4, 2, 2, 16, 16, 2)
    )
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    positions = TokenPositions.plain(3, offset=5)
    out = scheme.embed(x, scheme.tables(positions, torch.float64), positions)
    rows = [[math.sin(n), math.cos(n), math.sin(n / 100), math.cos(n / 100)] for n in (5, 6, 7)]
    expected = x * (2 if scale_tokens else 1) + torch.tensor(rows, dtype=torch.float64)
    close(out, expected, atol=1e-14)


def test_learned_table_row_n_is_position_n():
    scheme = Learned(LearnedSettings(), HeadGeometry(4, 2, 2, 9, 9, 2))
    with torch.no_grad():
        scheme.weight.copy_(torch.arange(36).view(9, 4))
    x = torch.randn(2, 3, 4)
    ragged = TokenPositions.left_padded([6, 5], 3, offset=3)
    found = []
    for positions in (TokenPositions.plain(3, offset=6), ragged):
        found.append(scheme.embed(x, scheme.tables(positions, torch.float32), positions) - x)
    torch.testing.assert_close(found[0][1], scheme.weight[6:9])
    torch.testing.assert_close(found[1], torch.stack([scheme.weight[3:6], scheme.weight[2:5]]))
