"""Our models for export: every scheme that llama.cpp computes, with its expected architecture."""

import torch

from model import ModelSettings, TokenPositions, Transformer

TRAINED = 64
ORIGINAL = 32
VOCABULARY = 258
SIZES = {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 96}
ROPE = {"name": "rope"}
NOPE = {"name": "none"}


def scaled(name: str, **more) -> dict:
    return ROPE | {"scaling": {"name": name, **more}}


def pattern(layers: list[str]) -> dict:
    kinds = {"r": ROPE, "n": NOPE, "w": ROPE | {"window": 16}}
    return {
        "name": "pattern",
        "layers": layers,
        "kinds": {kind: kinds[kind] for kind in dict.fromkeys(layers)},
    }


DIVISORS = [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0]
# name: (architecture in the file, whether it has a table of frequencies, model settings)
SCHEMES = {
    "rope": ("llama", False, {"position": ROPE}),
    "interleaved": ("llama", False, {"position": ROPE | {"layout": "interleaved"}}),
    "tied": ("llama", False, {"position": ROPE, "tie_embeddings": True}),
    "head_dim": ("llama", False, {"position": ROPE, "head_dim": 32}),
    "linear": ("llama", False, {"position": scaled("linear", factor=4)}),
    "ntk": ("llama", True, {"position": scaled("ntk", factor=4)}),
    "by_parts": ("llama", True, {"position": scaled("by_parts", factor=4)}),
    "yarn": ("llama", False, {"position": scaled("yarn", factor=4)}),
    "yarn_amplitude": (
        "llama",
        False,
        {"position": scaled("yarn", factor=4, attention_factor=1.0)},
    ),
    "yarn_wavelength": ("llama", True, {"position": scaled("yarn", factor=4, ramp="wavelength")}),
    "llama3": ("llama", True, {"position": scaled("llama3", factor=8)}),
    "longrope": (
        "llama",
        True,
        {
            "position": scaled(
                "longrope", short_factor=DIVISORS, long_factor=DIVISORS, attention_factor=1.1
            )
        },
    ),
    "drop": ("llama", True, {"position": scaled("drop")}),
    "resonance": ("llama", True, {"position": ROPE | {"resonance": True}}),
    "p_rope": ("llama", True, {"position": {"name": "p_rope"}}),
    "he_xu": ("llama", True, {"position": {"name": "he_xu"}}),
    "learned_rope": ("llama", True, {"position": {"name": "learned_rope"}}),
    "partial": ("phi3", False, {"position": ROPE | {"fraction": 0.5}}),
    "partial_yarn": ("phi3", False, {"position": scaled("yarn", factor=4) | {"fraction": 0.5}}),
    "partial_ntk": ("phi3", True, {"position": scaled("ntk", factor=4) | {"fraction": 0.5}}),
    "partial_head_dim": ("llama", True, {"position": ROPE | {"fraction": 0.5}, "head_dim": 32}),
    "none": ("llama", True, {"position": NOPE}),
    "every_fourth": ("smollm3", False, {"position": pattern(["r", "r", "r", "n"])}),
    "every_second": ("granite_swa", False, {"position": pattern(["r", "n"])}),
    "window": ("granite_swa", False, {"position": ROPE | {"window": 16}}),
    "windows_and_nope": ("granite_swa", False, {"position": pattern(["w", "w", "n"])}),
    "sink": ("granite_swa", False, {"position": ROPE | {"sink_logit": "learned"}}),
    "zero_sink": ("granite_swa", False, {"position": ROPE | {"sink_logit": "zero", "window": 16}}),
    "alibi": ("refact", False, {"position": {"name": "alibi"}}),
    "alibi_6_heads": (
        "refact",
        False,
        {"position": {"name": "alibi"}, "dim": 96, "heads": 6, "kv_heads": 3},
    ),
    "qk_norm": ("qwen3", False, {"position": ROPE | {"layout": "interleaved"}, "qk_norm": True}),
    "qk_norm_yarn": ("qwen3", False, {"position": scaled("yarn", factor=4), "qk_norm": True}),
    "temperature": (
        "llama",
        False,
        {"position": ROPE | {"temperature": {"name": "fixed", "value": 1.3}}},
    ),
    "head_temperature": ("llama", False, {"position": ROPE | {"temperature": {"name": "head"}}}),
    "ministral3": (
        "mistral3",
        True,
        {"position": ROPE | {"temperature": {"name": "ministral3", "length": 16}}},
    ),
    "qkv_biases": ("qwen2", False, {"position": ROPE, "attention_bias": "qkv"}),
    "biases": ("llama", False, {"position": ROPE, "attention_bias": "all", "mlp_bias": True}),
    "mup": ("granite", False, {"position": ROPE, "mup": {"base_dim": 32, "base_head_dim": 8}}),
    "mup_alibi": (
        "refact",
        False,
        {
            "position": {"name": "alibi"},
            "mup": {"base_dim": 32, "base_head_dim": 8},
            "tie_embeddings": True,
        },
    ),
    "multipliers": (
        "granite",
        False,
        {
            "position": ROPE,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logit_divisor": 2.0,
            "attention_multiplier": 0.1,
        },
    ),
    "multipliers_qk_norm": (
        "qwen3",
        False,
        {
            "position": ROPE,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logit_divisor": 2.0,
            "attention_multiplier": 0.1,
            "qk_norm": True,
            "tie_embeddings": True,
        },
    ),
}


def random_transformer(settings: dict) -> Transformer:
    """Weights large enough for attention and norms to matter, and learned parameters off their start."""
    model = Transformer(
        ModelSettings.model_validate(SIZES | settings), VOCABULARY, TRAINED, ORIGINAL
    )
    model.initialize(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            center = 1.0 if "norm" in name or name.endswith("position.scale") else 0.0
            weight.copy_(
                center + 0.3 * drawn if weight.ndim == 1 else 1.5 * drawn * weight.shape[1] ** -0.5
            )
    return model.eval()


def logits(model: Transformer, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), TokenPositions.plain(len(ids)))[0]
