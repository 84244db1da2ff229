"""Imported models give the logits of transformers' LlamaForCausalLM."""

import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from interop import InteropError, build_model, read_folder
from interop.huggingface.config import read_config
from model import TokenPositions
from model.position.scaling import YaRNScaling, plain_frequencies
from tests.interop.llamas import SMALL, llama

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES = {
    "default": {"rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {**LLAMA3, "rope_theta": 5000.0},
    "yarn": YARN,
    "yarn, every setting": {
        **YARN,
        "beta_fast": 6.0,
        "beta_slow": 0.7,
        "attention_factor": 1.3,
        "truncate": False,
    },
    "yarn, DeepSeek": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, no mscale_all_dim": {**YARN, "mscale": 0.7, "mscale_all_dim": 0},
    "yarn, no original length": {"rope_type": "yarn", "factor": 4.0},
}


def close(ours, theirs: LlamaForCausalLM, vocab: int = SMALL["vocab_size"], length: int = 60) -> None:
    tokens = torch.randint(0, vocab, (2, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(tokens).logits
        got = ours(tokens, TokenPositions.plain(length))
    assert expected.std() > 0.5, "flat logits would hide a difference"
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rope_parameters(rope, tmp_path):
    theirs = llama(rope_parameters=rope | {"rope_theta": rope.get("rope_theta", 10_000.0)})
    theirs.save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    close(build_model(read_folder(tmp_path)).model, theirs)


@given(
    theta=st.sampled_from([3.0, 50.0, 10_000.0]),
    original=st.integers(1, 4000),
    betas=st.tuples(st.floats(0.1, 20), st.floats(0.1, 40)).map(sorted).filter(lambda b: b[0] < b[1]),
    head_dim=st.sampled_from([4, 10, 16]),
    truncate=st.booleans(),
)
@example(10_000.0, 6, [1.0, 32.0], 10, True)  # 6 < 2π: every pair turns less than beta_slow times
@example(10_000.0, 2, [1.0, 32.0], 10, True)
@example(3.0, 4000, [1.0, 2.0], 10, True)  # every pair turns more than beta_fast times, ramp past the last
@example(3.0, 4000, [1.0, 2.0], 10, False)
@settings(max_examples=300)
def test_yarn_ramp_matches_transformers_or_is_rejected(theta, original, betas, head_dim, truncate):
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": 4.0,
        "original_max_position_embeddings": original,
        "beta_fast": betas[1],
        "beta_slow": betas[0],
        "truncate": truncate,
    }
    config = LlamaConfig(**(SMALL | {"head_dim": head_dim, "rope_parameters": rope}))
    theirs, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    keys = {"name": "yarn", "factor": 4.0, "beta_fast": betas[1], "beta_slow": betas[0], "truncate": truncate}
    ours = YaRNScaling(**keys).frequencies(plain_frequencies(theta, head_dim), 4.0, original)
    try:
        found = read_config(config.to_dict() | {"rope_parameters": rope}, "config.json")
    except InteropError as error:
        assert "original_max_position_embeddings" in str(error)
        # With truncate, a ramp that begins at the last index is rounded to one that agrees.
        assert truncate or (ours[0] / theirs.double() - 1).abs().max() > 0.5
    else:
        assert found.model.position.scaling == YaRNScaling(**keys)
        torch.testing.assert_close(ours[0], theirs.double(), rtol=1e-5, atol=0)
        assert ours[1] == pytest.approx(amplitude)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
def test_legacy_rope_theta_and_rope_scaling(key, rope, tmp_path):
    scaling = {k: v for k, v in ROPES[rope].items() if k not in ("rope_theta", "rope_type")}
    old = {"rope_theta": 700.0, "rope_scaling": None if rope == "default" else {key: rope, **scaling}}
    llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | old))
    theirs = LlamaForCausalLM.from_pretrained(tmp_path).eval()  # their own reading of the old form
    found = build_model(read_folder(tmp_path))
    assert found.shape.model.position.theta == 700.0
    close(found.model, theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1, "head_dim": 4},
    ],
    ids=str,
)
def test_shapes(changes, tmp_path):
    theirs = llama(**changes)
    theirs.save_pretrained(tmp_path)
    found = build_model(read_folder(tmp_path))
    assert (found.model.head is None) == changes.get("tie_word_embeddings", False)
    close(found.model, theirs)


def test_shards_and_half_precision(tmp_path):
    llama().to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="8KB")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    found = build_model(read_folder(tmp_path))
    assert len(found.checkpoint.files) > 2 and not (tmp_path / "model.safetensors").exists()
    close(found.model, theirs)


def test_missing_keys_have_transformers_defaults(tmp_path):
    """head_dim, key/value heads, epsilon, tying and theta were all left out by older versions."""
    theirs = llama(head_dim=4, num_key_value_heads=6, rms_norm_eps=1e-6, tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "rope_parameters"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = LlamaConfig.from_pretrained(tmp_path)
    assert (read.head_dim, read.rms_norm_eps) == (4, 1e-6)
    close(build_model(read_folder(tmp_path)).model, theirs)


def test_legacy_buffers_and_tied_head_are_ignored(tmp_path):
    theirs = llama(tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5),
        "lm_head.weight": load_file(file)["model.embed_tokens.weight"].clone(),
    }
    save_file(load_file(file) | extra, file)
    close(build_model(read_folder(tmp_path)).model, theirs)
