"""Checkpoints that would compute something else, or are damaged, are rejected with the reason."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from interop import InteropError, build_model, read_folder
from interop.huggingface.config import read_config
from tests.interop.models import FULL, SLIDING, YARN, make


def change(folder, **keys) -> None:
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v != "absent"})
    )


def rope(**keys) -> dict:
    return {"rope_parameters": {"rope_theta": 10_000.0} | keys}


@pytest.mark.parametrize(
    ("keys", "overrides"),
    [
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        (
            {"embedding_multiplier": 12.0},
            "embedding_multiplier = 12.0 .*llama models do not have it",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' .*only 'silu'"),
        (
            {"model_type": "mixtral"},
            "model_type = 'mixtral' .*mixture of experts.*supported: llama",
        ),
        ({"model_type": "qwen2-"}, "model_type = 'qwen2-' .*did you mean qwen2"),
        ({"model_type": "absent"}, "model_type = None"),
        ({"model_type": "mistral"}, "architectures .*must be MistralForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .*unquantized"),
        ({"hidden_size": "absent"}, "no 'hidden_size'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer above 0, got 0"),
        ({"vocab_size": "53"}, "vocab_size must be an integer"),
        ({"num_attention_heads": True}, "num_attention_heads must be"),
        ({"num_key_value_heads": 4}, "heads 6 are not divisible by kv_heads 4"),
        (rope(rope_type="dynamic"), "no 'factor'"),
        (rope(rope_type="longrope"), "longrope requires short_factor"),
        (
            rope(rope_type="longrope", short_factor=[1.0] * 5, long_factor=[1.0] * 4),
            "long_factor, a list of 5",
        ),
        (rope(rope_type="longrope", short_factor=[0.0] * 5), "short_factor, a list of 5"),
        (rope(rope_type="spiral"), "rope_type 'spiral' .*known: default"),
        (rope(rope_type="linear"), "no 'factor'"),
        (rope(rope_type="linear", factor=0.5), "factor"),
        (rope(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (
            rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=6),
            "original_max_position_embeddings = 6.*beta_slow = 1",
        ),
        (
            rope(
                rope_type="yarn", factor=4.0, rope_theta=2.0, original_max_position_embeddings=1000
            ),
            "original_max_position_embeddings = 1000.*beta_fast = 32",
        ),
        (
            {"original_max_position_embeddings": "32"} | rope(rope_type="yarn", factor=4.0),
            "must be an integer",
        ),
        ({"rope_parameters": [1.0]}, "rope_parameters must be an object"),
    ],
)
def test_unsupported_configs(folder, keys, overrides):
    change(folder, **keys)
    with pytest.raises(InteropError, match=f"config.json.*{overrides}"):
        build_model(read_folder(folder))


NESTED = {
    FULL: YARN | {"rope_theta": 1e4},
    SLIDING: YARN | {"rope_theta": 1e4, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("qwen2", {"layer_types": [SLIDING] * 5, "sliding_window": None}, "sliding_window is null"),
        ("qwen2", {"layer_types": [FULL] * 4}, "layer_types must be 5 times"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 5}, "layer_types must be 5 times"),
        ("llama", {"layer_types": [SLIDING] * 5}, "llama models have no sliding_attention"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias = true .*qwen3 models do not have it"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer above 0"),
        (
            "mistral",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor must be 1 in this family",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must have 5 entries, got 2"),
        (
            "granite_swa",
            {"layer_rope_theta": [1e4, "x", 0, 0, 0]},
            "layer_rope_theta must be a list of numbers",
        ),
        ("granite", {"residual_multiplier": -1.0}, "residual_multiplier must be a number above 0"),
        (
            "phi3",
            {"partial_rotary_factor": 0.3, "rope_parameters": None},
            "rotates 3 of 10 features",
        ),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "must be at most 1"),
        ("ministral3", {"rope_parameters": YARN}, "no 'llama_4_scaling_beta'"),
        ("olmo3", {"rope_parameters": NESTED}, "different original lengths .16, 32."),
        ("llama", {"rope_parameters": {FULL: [1.0]}}, "full_attention must be an object"),
        ("olmo3", {"rope_parameters": {FULL: [1.0]}}, "full_attention must be an object"),
        ("olmo3", {"rope_parameters": YARN}, "must have full_attention and sliding_attention"),
        (
            "olmo3",
            {"rope_theta": 1e4, "rope_scaling": YARN},
            "rope_theta = 10000 .*layers with windows",
        ),
    ],
)
def test_unsupported_configs_of_families(model_type, keys, message):
    config = make(model_type).config.to_dict() | {"rope_parameters": None} | keys
    with pytest.raises(InteropError, match=f"config.json.*{message}"):
        read_config(config, "config.json")


def spoil(folder, **tensors) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, file)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "overrides"),
    [
        ({Q: None}, f"requires {Q}, which the weights do not have"),
        ({"lm_head.weight": None}, "requires lm_head.weight.*tie_word_embeddings = true"),
        (
            {"model.layers.1.self_attn.q_proj.bias": torch.zeros(60)},
            "contains .*q_proj.bias.* does not have",
        ),
        (
            {"model.layers.3.input_layernorm.weight": torch.ones(24)},
            "layers.3.input_layernorm.weight",
        ),
        ({Q: torch.zeros(24, 60)}, rf"{Q} has shape \(24, 60\), .* \(60, 24\)"),
        ({Q: torch.zeros(60, 24, dtype=torch.int8)}, f"{Q} is stored as I8"),
        ({Q: torch.zeros(60, 24, dtype=torch.float64)}, f"{Q} is stored as F64"),
    ],
)
def test_invalid_tensors(folder, tensors, overrides):
    spoil(folder, **tensors)
    with pytest.raises(InteropError, match=overrides):
        build_model(read_folder(folder))


def test_head_contradicting_tie_embeddings(folder):
    change(folder, tie_word_embeddings=True)
    with pytest.raises(InteropError, match=r"lm_head.weight differs from the embedding"):
        build_model(read_folder(folder))


def test_pickles_are_never_loaded(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(InteropError, match=r"pytorch_model.bin is a pickle.*save_pretrained"):
        build_model(read_folder(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(InteropError, match=r"neither model.safetensors nor"):
        build_model(read_folder(folder))


def test_truncated_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InteropError, match=r"model.safetensors is damaged.*download it again"):
        build_model(read_folder(folder))


def test_invalid_directories(folder, tmp_path):
    with pytest.raises(InteropError, match="is not a folder"):
        build_model(read_folder(tmp_path / "absent"))
    (folder / "config.json").write_text("{broken")
    with pytest.raises(InteropError, match=r"config.json is not valid JSON"):
        build_model(read_folder(folder))
    (folder / "config.json").unlink()
    with pytest.raises(InteropError, match=r"contains no config.json"):
        build_model(read_folder(folder))


def test_invalid_shard_indexes(folder):
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
    index = folder / "model.safetensors.index.json"

    def write(places: dict) -> None:
        index.write_text(json.dumps({"weight_map": places}))

    whole = dict.fromkeys(names, "model-1-of-1.safetensors")
    write(whole)
    assert build_model(read_folder(folder)).model.vocab_size == 53
    for places, overrides in (
        (whole | {Q: "../model-1-of-1.safetensors"}, "not in a shard of this folder"),
        (whole | {Q: "model-2-of-2.safetensors"}, "model-2-of-2.safetensors is missing"),
        (whole | {"model.extra": "model-1-of-1.safetensors"}, "disagree about model.extra"),
        ({}, "has no weight_map"),
    ):
        write(places)
        with pytest.raises(InteropError, match=overrides):
            build_model(read_folder(folder))
