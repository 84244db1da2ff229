"""Models in classes of transformers: the class, logits past the trained length, and what weights
absorb."""

import json

import pytest
import torch

from interop.export import native
from interop.export.classes import choose_class
from interop.export.files import write_model
from interop.export.parity import measure, parity_lengths
from tests.interop.export.exported import CONTROLS
from tests.model.zoo import CASES, G, H, build

EVEN = {"dim": 60}  # H·D, which LlamaConfig and scaled partial rotations require
YARN = {"name": "yarn", "factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.2}
LONGROPE = {**CASES["rope-longrope"]["scaling"], "attention_factor": 1.2}
GEMMA = {
    **EVEN,
    "qk_norm": True,
    "norm_placement": "both",
    "activation": "gelu_tanh",
    "embedding_multiplier": EVEN["dim"] ** 0.5,
}
NEAR = {"name": "rope", "window": 4}
FAR = {"name": "none"}


def rope(**keys) -> dict:
    return {"name": "rope", **keys}


def pattern(layers: list[str], **kinds) -> dict:
    return {"name": "pattern", "layers": layers, "kinds": kinds}


# name → (class, position, model settings)
MODELS: dict[str, tuple[str, dict, dict]] = {
    "rope": ("llama", rope(), EVEN),
    "interleaved": ("llama", rope(layout="interleaved"), EVEN),
    "llama3": ("llama", rope(scaling={"name": "llama3", "factor": 8.0}), EVEN),
    "yarn": ("llama", rope(scaling=YARN), EVEN),
    "yarn-mscale": ("llama", rope(scaling={**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}), EVEN),
    "yarn-wavelength": ("llama", rope(scaling={**YARN, "ramp": "wavelength"}), EVEN),
    "ntk": ("llama", rope(scaling={"name": "ntk", "factor": 4.0}), EVEN),
    "dynamic": ("llama", rope(scaling={"name": "dynamic", "factor": 1.5}), EVEN),
    "longrope": ("llama", rope(scaling=LONGROPE), EVEN),
    "p_rope": ("llama", CASES["p_rope-reversed"], EVEN),
    "biases": (
        "llama",
        rope(layout="interleaved"),
        {**EVEN, "attention_bias": "all", "mlp_bias": True},
    ),
    "head": ("llama", rope(temperature={"name": "head"}), EVEN),
    "mup": (
        "llama",
        rope(),
        {**EVEN, "mup": {"base_dim": 7, "base_head_dim": 4}, "tie_embeddings": True},
    ),
    "uneven": ("mistral", rope(), {}),
    "window": ("mistral", rope(window=5, layout="interleaved"), {}),
    "qk_norm": ("qwen3", rope(layout="interleaved"), {"qk_norm": True}),
    "qk_norm-mup": ("qwen3", rope(), {"qk_norm": True, "mup": {"base_dim": 7, "base_head_dim": 4}}),
    "qk_norm-window": ("qwen3", pattern(["a", "b"], a=rope(window=5), b=rope()), {"qk_norm": True}),
    "qkv-biases": ("qwen2", rope(layout="interleaved"), {"attention_bias": "qkv"}),
    "partial": ("phi3", rope(fraction=0.6, layout="interleaved"), {}),
    "partial-yarn": ("phi3", rope(fraction=0.6, scaling=YARN, window=6), EVEN),
    "dropped": ("smollm3", rope(scaling={"name": "drop"}), {}),
    "nope-every-third": ("smollm3", pattern(["a", "a", "b"], a=rope(), b=FAR), {}),
    "nope-window": ("smollm3", pattern(["a", "b"], a=NEAR, b=FAR), {}),
    "ministral3": (
        "ministral3",
        rope(temperature={"name": "ministral3", "beta": 0.3, "length": 4}),
        {},
    ),
    "ministral3-window": (
        "ministral3",
        rope(window=6, temperature={"name": "ministral3", "beta": 0.3}),
        {},
    ),
    "multipliers": ("granite", rope(), {"residual_multiplier": 0.4, "logit_divisor": 3.0}),
    "bases": (
        "granite_swa",
        pattern(["a", "b"], a=NEAR, b=rope(theta=500.0, layout="interleaved")),
        {},
    ),
    "sinks": ("granite_swa", rope(sink_logit="learned"), {}),
    "zero-sinks": ("granite_swa", rope(sink_logit="zero", window=5), {}),
    "olmo2": (
        "olmo2",
        rope(layout="interleaved"),
        {"qk_norm": "all_heads", "norm_placement": "output"},
    ),
    "olmo3": (
        "olmo3",
        pattern(["a", "b"], a=rope(window=5), b=rope()),
        {"qk_norm": "all_heads", "norm_placement": "output"},
    ),
    "gemma3": ("gemma3_text", pattern(["a", "b"], a=rope(window=5), b=rope(theta=500.0)), GEMMA),
    "gemma3-mup": (
        "gemma3_text",
        rope(layout="interleaved", window=5),
        {**GEMMA, "mup": {"base_dim": 7, "base_head_dim": 4}, "logit_softcap": 3.0},
    ),
}


# One of each class, and a scaled table without a kind in transformers.
QUICK = {
    "p_rope",
    "yarn-mscale",
    "mup",
    *{model_type: name for name, (model_type, _, _) in MODELS.items()}.values(),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_class_and_logits(name, tmp_path):
    """At 1, 4 and 16 times the trained length, in passes with a cache."""
    model_type, position, keys = MODELS[name]
    model = build(position, dtype=torch.float32, **keys)
    choice = choose_class(model)
    assert choice.model_type == model_type, choice.reason
    write_model(model, choice, tmp_path, CONTROLS)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["bos_token_id"] is config["eos_token_id"] is None
    for parity in measure(model, tmp_path, model_type, parity_lengths(model)):
        assert parity.is_met, parity


def test_folded_factors():
    """A factor per head multiplies the rows of its head; a norm of queries absorbs one for all
    heads."""
    model = build(rope(temperature={"name": "fixed", "value": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}))
    weights = native.weights(model, model.state_dict(), choose_class(model))
    name = "model.layers.0.self_attn.q_proj.weight"
    ratio = weights[name] / model.state_dict()["layers.0.attention.wq.weight"]
    expected = torch.arange(1.0, H + 1).double().repeat_interleave(model.settings.head_dim)
    torch.testing.assert_close(ratio, expected[:, None].expand_as(ratio))
    keys = weights["model.layers.0.self_attn.k_proj.weight"]
    assert len(keys) == G * model.settings.head_dim
    assert torch.equal(keys, model.state_dict()["layers.0.attention.wk.weight"])
