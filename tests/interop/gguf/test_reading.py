"""GGUF files of every supported architecture have the logits of the models they were made from."""

import math

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from interop import build_model
from interop.gguf import read_gguf
from interop.gguf.reading.file import GGUFFile
from model import TokenPositions
from tests.interop.gguf.files import GRANITE_SWA, metadata, raw_blocks, write, write_model
from tests.interop.models import make

LENGTH = 96  # beyond max_position_embeddings, 64
THETA = 10_000.0
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DIVISORS = torch.tensor([1.0, 1.5, 2.0, 4.0, 7.0])


def llama3_divisors(pairs: int) -> torch.Tensor:
    """By the formula of llama.cpp's conversion/llama.py."""
    found = []
    for k in range(pairs):
        wavelength = 2 * math.pi * THETA ** (k / pairs)
        smooth = min(max((8192 / wavelength - 1) / 3, 0), 1)
        found.append(1 / ((1 - smooth) / 8 + smooth))
    return torch.tensor(found)


def rope(**more) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": THETA} | more}


# name: (architecture, model type, its config, metadata, tensors of the file only, whether rows are permuted)
CASES = {
    "llama": ("llama", "llama", {}, {}, {}, True),
    "llama-tied": ("llama", "llama", {"tie_word_embeddings": True}, {}, {}, True),
    "llama-biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}, {}, True),
    "llama-linear": (
        "llama",
        "llama",
        rope(rope_type="linear", factor=4.0),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
        True,
    ),
    "llama-linear-old-key": (
        "llama",
        "llama",
        rope(rope_type="linear", factor=4.0),
        {"rope.scale_linear": 4.0},
        {},
        True,
    ),
    "llama-yarn": (
        "llama",
        "llama",
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
        {},
        True,
    ),
    "llama-llama3": (
        "llama",
        "llama",
        {"rope_parameters": LLAMA3},
        {},
        {"rope_freqs.weight": llama3_divisors(5)},
        True,
    ),
    "llama-table": (
        "llama",
        "llama",
        rope(
            rope_type="longrope",
            short_factor=DIVISORS.tolist(),
            long_factor=DIVISORS.tolist(),
            attention_factor=1.25,
            original_max_position_embeddings=64,
        ),
        {"rope.scaling.attn_factor": 1.25},
        {"rope_freqs.weight": DIVISORS},
        True,
    ),
    "mistral-window": (
        "llama",
        "mistral",
        {"sliding_window": 20},
        {"attention.sliding_window": 20},
        {},
        True,
    ),
    "smollm3": (
        "smollm3",
        "smollm3",
        {"no_rope_layer_interval": 4, "use_sliding_window": False},
        {},
        {},
        True,
    ),
    "qwen2": ("qwen2", "qwen2", {"head_dim": 4, "use_sliding_window": False}, {}, {}, False),
    "qwen3": ("qwen3", "qwen3", {"use_sliding_window": False}, {}, {}, False),
    "phi3": (
        "phi3",
        "phi3",
        rope(partial_rotary_factor=0.5) | {"head_dim": 4},
        {"rope.dimension_count": 2},
        {},
        False,
    ),
    "phi3-longrope": (
        "phi3",
        "phi3",
        rope(
            rope_type="longrope",
            short_factor=[1.0, 1.1],
            long_factor=[2.0, 5.0],
            attention_factor=1.2,
            original_max_position_embeddings=64,
        )
        | {"head_dim": 4, "original_max_position_embeddings": 64},
        {
            "rope.scaling.type": "longrope",
            "rope.scaling.attn_factor": 1.2,
            "rope.scaling.original_context_length": 64,
        },
        {
            "rope_factors_short.weight": torch.tensor([1.0, 1.1]),
            "rope_factors_long.weight": torch.tensor([2.0, 5.0]),
        },
        False,
    ),
    "granite": (
        "granite",
        "granite",
        {
            "head_dim": 4,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
        {"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.3, "logit_scale": 2.0},
        {},
        True,
    ),
    "granite_swa": (
        GRANITE_SWA,
        GRANITE_SWA,
        {
            "sliding_window": 20,
            "attention_multiplier": 0.3,
            "layer_types": [
                "full_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "layer_rope_theta": [THETA, THETA, 0, 0, THETA],
        },
        {
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [False, True, False, True, False],
            "attention.rope_pattern": [True, True, False, False, True],
            "attention.scale": 0.3,
            "logit_scale": 1.0,
        },
        {},
        True,
    ),
    "ministral3": (
        "mistral3",
        "ministral3",
        rope(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.2,
        ),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.2,
        },
        {},
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_match_transformers(name, tmp_path):
    architecture, model_type, config, about, extra, permuted = CASES[name]
    theirs = make(model_type, **config)
    heads = (
        (theirs.config.num_attention_heads, theirs.config.num_key_value_heads) if permuted else None
    )
    path = write_model(tmp_path / "m.gguf", architecture, theirs, about, heads=heads, extra=extra)
    imported = build_model(read_gguf(path))
    ids = torch.randint(53, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(ids).logits
        found = imported.model(ids, TokenPositions.plain(LENGTH))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5 * float(expected.abs().max()))
    assert imported.shape.train_length == 64
    assert len(imported.checkpoint.files) == 1


def test_transformers_reads_the_same_weights(tmp_path):
    """transformers' own conversion undoes the permutation of the rows too."""
    theirs = make("llama")
    keys = {"model": "no_vocab", "tokens": [f"t{i}" for i in range(53)]}
    path = write_model(tmp_path / "m.gguf", "llama", theirs, heads=(6, 2), tokenizer=keys)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).state_dict()
    tensors = {name: tensor.read() for name, tensor in read_gguf(path).tensors.items()}
    assert tensors.keys() == loaded.keys()
    for name, weight in tensors.items():
        assert torch.equal(weight, loaded[name]), name


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("kind", [*KINDS, *K_QUANTS])
def test_dequantized_values(kind, tmp_path):
    """Every stored type, against `gguf`'s own reader."""
    number = gguf.GGMLQuantizationType[kind]
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = np.random.default_rng(1).normal(size=(6, 512)).astype(np.float32)
    data = raw_blocks(number, 6, 512) if kind in K_QUANTS else gguf.quantize(values, number)
    writer.add_tensor("a", np.ones(3, np.float32))  # so that the next one does not begin at 0
    writer.add_tensor("b", data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert file.tensors["b"].shape == (6, 512) and file.tensors["b"].dtype == kind
    reference = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "b")
    found = file.tensors["b"].read()
    assert found.dtype == torch.float32 and found.isfinite().all()
    assert np.array_equal(found.numpy(), gguf.dequantize(reference.data, number).reshape(6, 512))
    if kind in KINDS:
        error = {"F32": 0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.02}.get(kind, 0.5)
        assert np.abs(found.numpy() - values).max() <= error


def test_metadata_of_all_types(tmp_path):
    """The header is parsed here; `gguf`'s reader is the reference."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "uint8": 200, "int8": -3, "uint16": 60_000, "int16": -300, "uint32": 1 << 31, "int32": -(1 << 30),
        "uint64": 1 << 60, "int64": -(1 << 60), "float32": 0.5, "float64": 1e-300, "bool": True,
        "string": "ünïcode ▁",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.numbers", [1, -2, 3])
    writer.add_array("x.words", ["a", "", "ß"])
    writer.add_array("x.flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFFile(path).metadata
    assert {key[2:]: value for key, value in found.items() if key.startswith("x.")} == values | {
        "numbers": [1, -2, 3],
        "words": ["a", "", "ß"],
        "flags": [True, False],
    }
    for key, field in gguf.GGUFReader(path).fields.items():
        assert key.startswith("GGUF.") or found[key] == field.contents()


def test_vocabulary_size_from_the_embedding(tmp_path):
    theirs = make("llama")
    about = metadata(theirs.config)
    del about["vocab_size"]
    path = write(tmp_path / "m.gguf", "llama", theirs.state_dict(), about, heads=(6, 2))
    assert read_gguf(path).config["vocab_size"] == 53
