"""Models in classes of transformers: logits past the trained length, padding, and import of the
export."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from interop.export import native
from interop.export.angles import exact_angles
from interop.export.classes import choose_class
from interop.export.parity import measure, parity_lengths, tolerance
from model import TokenPositions, Transformer
from tests.interop.export.exported import LENGTH, PADDING, write
from tests.model.zoo import CASES, G, H, V, build

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


def made(name: str) -> tuple[str, Transformer]:
    model_type, position, keys = MODELS[name]
    return model_type, build(position, dtype=torch.float32, **keys)


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
def test_logits_and_import(name, tmp_path):
    model_type, model = made(name)
    choice = write(model, tmp_path / "out")
    assert choice.model_type == model_type
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert theirs.config.bos_token_id is theirs.config.eos_token_id is None
    generator = torch.Generator().manual_seed(1)
    for length in (LENGTH, 9 * LENGTH):
        ids = torch.randint(0, V, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        # transformers' dynamic frequencies are those of the longest row.
        padding = 0 if name == "dynamic" else PADDING
        mask[1, :padding] = 0
        with torch.no_grad(), exact_angles(theirs, model, length):
            # Given positions, because transformers does not derive those of absolute factors from
            # the mask.
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)
            found = theirs.eval()(ids, attention_mask=mask, position_ids=position_ids).logits
            ours = model(ids, TokenPositions.left_padded([length, length - padding], length))
        difference = (found - ours)[mask == 1].abs().max()
        assert difference <= tolerance(float(ours.abs().max())), (length, difference)
    assert all(
        one.is_met for one in measure(model, tmp_path / "out", model_type, parity_lengths(model))
    )


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
