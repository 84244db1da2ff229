"""Frequencies, rotations, slopes and sinusoids against other implementations and closed forms.

The references are transformers (a test dependency only) and formulas written from the papers with
`math` alone. No table of ours is used on both sides of a comparison.
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


def test_partial_rotation_leaves_other_features_unchanged():
    x = torch.randn(10, dtype=torch.float64)
    for layout in ("half", "interleaved"):
        out = turned(x, 6, layout, fraction=0.5)  # int(10 · 0.5) = 5 features, 2 pairs
        close(out[4:], x[4:], atol=0)
        close(out[:4], turned(x[:4], 6, layout), atol=1e-13)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16, 20])
def test_alibi_slopes(heads):
    slopes = alibi_slopes(heads)
    torch.testing.assert_close(slopes.float(), _get_alibi_slopes(heads, "cpu"), rtol=1e-6, atol=0)
    t = 5
    mpt = build_mpt_alibi_tensor(heads, t)[:, 0]  # (H, T): for the last query, slope · −distance
    ours = -slopes[:, None] * torch.arange(t - 1, -1, -1)[None]
    torch.testing.assert_close(ours.float(), mpt, rtol=1e-6, atol=0)


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
