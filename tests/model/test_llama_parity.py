"""The whole decoder against Hugging Face's Llama, random weights mapped by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from model import ModelSettings, TokenPositions, Transformer
from model.position.schemes.rope import RopeSettings
from tests.model.llama import as_llama, their_name
from tests.model.zoo import close

C = 30
LAYERS = 3
H = 6
D = 10
HIDDEN = 43
V = 37
B = 2
T = 23
TRAIN = 16


class ExactNorm(nn.Module):
    """Theirs drops to float32 in the middle; the formula in the dtype it is given."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class ExactRotary(nn.Module):
    """Theirs computes angles in float32; the same frequencies in float64."""

    def __init__(self, inv_freq: torch.Tensor, amplitude: float):
        super().__init__()
        self.inv_freq = inv_freq.double()
        self.amplitude = amplitude

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq
        wide = torch.cat([angles, angles], dim=-1)
        return wide.cos() * self.amplitude, wide.sin() * self.amplitude


def pair(
    groups: int,
    tie_embeddings: bool,
    dtype: torch.dtype,
    scaling: dict | None = None,
    theirs: dict | None = None,
):
    """Our model and theirs with the same random weights."""
    settings = ModelSettings(
        dim=C,
        layers=LAYERS,
        heads=H,
        kv_heads=groups,
        head_dim=D,
        ffn_dim=HIDDEN,
        tie_embeddings=tie_embeddings,
        position=RopeSettings(theta=500.0, scaling=scaling or {"name": "none"}),
    )
    model = Transformer(settings, V, TRAIN)
    generator = torch.Generator().manual_seed(7)
    state = {
        name: torch.randn(p.shape, generator=generator)
        * (1.3 * p.shape[-1] ** -0.5 if p.ndim == 2 else 0.2)
        + (p.ndim == 1)
        for name, p in model.named_parameters()
    }
    model.load_state_dict(state)
    rope = {"rope_theta": 500.0, "rope_type": "default", **(theirs or {})}
    reference = as_llama(model, rope_parameters=rope, attn_implementation="sdpa")
    return model.to(dtype).eval(), reference.to(dtype)


def make_exact(reference: LlamaForCausalLM) -> None:
    inner = reference.model
    inner.rotary_emb = ExactRotary(inner.rotary_emb.inv_freq, inner.rotary_emb.attention_scaling)
    inner.norm = ExactNorm(inner.norm.weight, 1e-5)
    for layer in inner.layers:
        layer.input_layernorm = ExactNorm(layer.input_layernorm.weight, 1e-5)
        layer.post_attention_layernorm = ExactNorm(layer.post_attention_layernorm.weight, 1e-5)


TOKENS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("groups", "tie_embeddings"), [(6, False), (3, True), (2, False), (1, False)]
)
@torch.no_grad()
def test_float64_logits(groups, tie_embeddings):
    model, reference = pair(groups, tie_embeddings, torch.float64)
    make_exact(reference)
    # Their float32 frequencies are the only thing left to differ: give them ours to full precision,
    # retyped.
    reference.model.rotary_emb.inv_freq = 500.0 ** (-torch.arange(0, D, 2).double() / D)
    ours = model(TOKENS)
    theirs = reference(TOKENS).logits
    assert ours.std() > 0.3
    close(ours, theirs, atol=1e-10)


@pytest.mark.parametrize(
    ("scaling", "theirs"),
    [
        (None, None),
        ({"name": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"name": "yarn", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}),
        (
            {"name": "llama3", "factor": 4.0},
            {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
    ],
    ids=["none", "linear", "yarn", "llama3"],
)
@torch.no_grad()
def test_float32_logits_of_unmodified_transformers(scaling, theirs):
    theirs = theirs and {**theirs, "original_max_position_embeddings": TRAIN}
    model, reference = pair(3, False, torch.float32, scaling, theirs)
    close(model(TOKENS), reference(TOKENS).logits, atol=3e-5)


@torch.no_grad()
def test_left_padded_logits():
    model, reference = pair(3, False, torch.float64)
    make_exact(reference)
    counts = [T, T - 9]
    mask = torch.tensor([[0] * (T - c) + [1] * c for c in counts])
    position = (mask.cumsum(1) - 1).clamp(min=0)
    theirs = reference(TOKENS, attention_mask=mask, position_ids=position).logits
    ours = model(TOKENS, TokenPositions.left_padded(counts, T))
    close(ours[mask.bool()], theirs[mask.bool()], atol=1e-6)


def test_gradients():
    model, reference = pair(3, False, torch.float64)
    make_exact(reference)
    reference.model.rotary_emb.inv_freq = 500.0 ** (-torch.arange(0, D, 2).double() / D)
    model(TOKENS[:, :-1], TokenPositions.plain(T - 1), targets=TOKENS[:, 1:]).mean().backward()
    logits = reference(TOKENS[:, :-1]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    theirs = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        close(p.grad, theirs[their_name(name)].grad, atol=1e-11)
