"""Checkpoints that would compute something else, or are damaged, are rejected with the reason."""

import json
from dataclasses import replace
from resource import RUSAGE_SELF, getrusage

import pytest
import torch
from safetensors.torch import load_file, save_file

from interop import InteropError, build_model, read_folder
from interop.huggingface.config import read_config
from interop.huggingface.families import FULL, SLIDING
from tests.interop.models import ABSENT, FIRST, ROPES, variant


def change(folder, **keys) -> None:
    config = json.loads((folder / "config.json").read_text()) | keys
    config = {key: value for key, value in config.items() if value != ABSENT}
    (folder / "config.json").write_text(json.dumps(config))


def rope(rope_type, **keys) -> dict:
    return {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": rope_type} | keys}


YARN = ROPES["yarn"]
BRIEF_YARN = {"factor": 4.0, "original_max_position_embeddings": 6}
FLAT_YARN = {"factor": 4.0, "rope_theta": 2.0, "original_max_position_embeddings": 1000}
NESTED = {
    FULL: YARN | {"rope_theta": 1e4},
    SLIDING: YARN | {"rope_theta": 1e4, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "gemma3"}, "gemma3.*images"),
        ({"model_type": "mixtral"}, "mixtral.*layers of experts"),
        ({"model_type": "qwen2-"}, "qwen2-.*did you mean qwen2"),
        ({"model_type": ABSENT}, "model_type"),
        ({"model_type": "mistral"}, "architectures .*MistralForCausalLM"),
        ({"architectures": 5}, "architectures"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": ABSENT}, "hidden_size"),
        ({"num_key_value_heads": 4}, "heads 6.*kv_heads 4"),
        (rope("dynamic"), "factor"),
        (rope("longrope", short_factor=[1.0] * 5, long_factor=[1.0] * 4), "long_factor"),
        (rope("spiral"), "rope_type 'spiral'"),
        (rope("linear", factor=0.5), "factor"),
        (rope("default", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (rope("yarn", **BRIEF_YARN), "original_max_position_embeddings = 6.*beta_slow = 1"),
        (rope("yarn", **FLAT_YARN), "original_max_position_embeddings = 1000.*beta_fast = 32"),
    ],
)
def test_unsupported_configs(folder, keys, named):
    change(folder, **keys)
    with pytest.raises(InteropError, match=f"config.json.*{named}"):
        build_model(read_folder(folder))


@pytest.mark.parametrize(
    ("model_type", "keys", "named"),
    [
        ("qwen2", {"layer_types": [SLIDING] * 5, "sliding_window": None}, "sliding_window"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 5}, "layer_types"),
        ("llama", {"layer_types": [SLIDING] * 5}, "layer_types"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("phi3", {"partial_rotary_factor": 0.3}, "rotates 3 of 10 features"),
        ("ministral3", {"rope_parameters": YARN}, "llama_4_scaling_beta"),
        ("olmo3", {"rope_parameters": NESTED}, "original lengths .16, 32."),
        ("olmo3", {"rope_parameters": YARN}, f"{FULL} and {SLIDING}"),
        ("olmo3", {"rope_theta": 1e4, "rope_scaling": YARN}, "rope_theta = 10000"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "heads 4.*kv_heads 3"),
        ("bamba", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("bamba", {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ("granitemoehybrid", {"num_local_experts": 4}, "num_local_experts = 4.*experts"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, "experts.*first_k_dense_replace"),
        ("kimi_linear", {"mlp_layer_types": None}, "experts.*first_k_dense_replace"),
        ("kimi_linear", {"mlp_layer_types": ["dense", "sparse"]}, "experts.*mlp_layer_types"),
        ("gemma4_text", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2"),
        ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block.*experts"),
        ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
        ("llama", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
    ],
)
def test_unsupported_configs_of_families(model_type, keys, named):
    config = variant(model_type).config.to_dict() | {"rope_parameters": None} | keys
    with pytest.raises(InteropError, match=f"config.json.*{named}"):
        read_config(config, "config.json")


HUGE = 10**9


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"num_hidden_layers": HUGE}),
        ("llama", {"head_dim": HUGE} | rope("yarn", factor=4.0)),
        ("llama", {"hidden_size": HUGE}),
        ("llama", {"vocab_size": HUGE}),
        ("llama", {"num_attention_heads": 2 * HUGE, "num_key_value_heads": HUGE}),
        ("lfm2", {"conv_L_cache": HUGE}),
        ("qwen3_5_text", {"linear_value_head_dim": HUGE}),
        ("deepseek_v3", {"kv_lora_rank": HUGE}),
        ("kimi_linear", {"linear_head_dim": HUGE}),
        ("bamba", {"mamba_d_state": HUGE}),
        ("gemma4_text", {"head_dim": HUGE}),
    ],
    ids=str,
)
def test_sizes_that_the_weights_do_not_have(name, keys, tmp_path):
    """Refused before anything of the claimed size is allocated."""
    variant(name).save_pretrained(tmp_path)
    change(tmp_path, **keys)
    before = getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(InteropError, match=f"config.json.*{next(iter(keys))} = "):
        build_model(read_folder(tmp_path))
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize(
    "settings", [{"layers": HUGE}, {"kinds": {"a": {"mixer": {"rank": HUGE}}}}], ids=str
)
def test_sizes_of_a_generated_folder(settings, folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "sextant", "settings": settings}))
    with pytest.raises(InteropError, match=r"config.json.*(layers|rank) = "):
        build_model(read_folder(folder))


QUICK = ("bamba",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FIRST],
)
def test_any_value_of_any_key(name, tmp_path):
    """One sentence, or a model; never another error or a large allocation."""
    variant(name).save_pretrained(tmp_path)
    checkpoint = read_folder(tmp_path)
    rotary = checkpoint.config.get("rope_parameters", {})
    before = getrusage(RUSAGE_SELF).ru_maxrss
    for value in (HUGE, -1, "x", [["x"]], {"a": [1]}, float("nan")):
        changes = [{key: value} for key in checkpoint.config]
        changes += [{"rope_parameters": rotary | {key: value}} for key in rotary]
        for keys in changes:
            try:
                build_model(replace(checkpoint, config=checkpoint.config | keys))
            except InteropError as error:
                assert "\n" not in str(error)
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def spoil(folder, **tensors) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, file)


Q = "model.layers.1.self_attn.q_proj.weight"
BIAS = "model.layers.1.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({Q: None}, Q),
        ({BIAS: torch.zeros(60)}, BIAS),
        ({Q: torch.zeros(24, 60)}, rf"{Q} .*\(24, 60\), .* \(60, 24\)"),
        ({Q: torch.zeros(60, 24, dtype=torch.int8)}, f"{Q} .*I8"),
        ({Q: torch.full((60, 24), torch.nan)}, f"{Q} .*not finite"),
    ],
)
def test_invalid_tensors(folder, tensors, named):
    spoil(folder, **tensors)
    with pytest.raises(InteropError, match=named):
        build_model(read_folder(folder))


FORGED = "x\nwarning: all is well"


def test_foreign_names_stay_on_one_line(folder):
    spoil(folder, **{FORGED: torch.zeros(2)})
    with pytest.raises(InteropError) as refusal:
        build_model(read_folder(folder))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {FORGED: "../x"}}))
    with pytest.raises(InteropError) as refused_index:
        read_folder(folder)
    for message in (str(refusal.value), str(refused_index.value)):
        assert "all is well" in message and "\n" not in message


def test_head_contradicting_tie_embeddings(folder):
    change(folder, tie_word_embeddings=True)
    with pytest.raises(InteropError, match=r"lm_head.weight"):
        build_model(read_folder(folder))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{broken"),
        ("config.json", b"[" * 100_000),
        ("model.safetensors", None),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{"),
        ("pytorch_model.bin", b"cos\nsystem\n(S'exit 1'\ntR."),  # a pickle, never loaded
    ],
)
def test_damaged_and_missing_files(folder, file, content):
    if file != "config.json":
        (folder / "model.safetensors").unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(InteropError, match=file):
        build_model(read_folder(folder))


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ({Q: "../model-1-of-1.safetensors"}, "not in a shard"),
        ({Q: "model-2-of-2.safetensors"}, "model-2-of-2.safetensors"),
        ({"model.extra": "model-1-of-1.safetensors"}, "model.extra"),
        (None, "weight_map"),
    ],
)
def test_invalid_shard_indexes(folder, places, named):
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
    index = folder / "model.safetensors.index.json"
    whole = dict.fromkeys(names, "model-1-of-1.safetensors")
    index.write_text(json.dumps({"weight_map": whole}))
    assert build_model(read_folder(folder)).model.vocab_size == 53
    index.write_text(json.dumps({"weight_map": {} if places is None else whole | places}))
    with pytest.raises(InteropError, match=named):
        build_model(read_folder(folder))
