"""Export to GGUF: the architecture of every scheme, exact tensors, and what is refused."""

import os

import gguf
import numpy as np
import pytest
import torch

from data import ByteTokenizer
from errors import InteropError
from interop import build_model
from interop.gguf import read_gguf, write_gguf
from interop.gguf.reading.file import GGUFFile
from interop.gguf.writing.plan import make_plan
from model import SCHEMES as REGISTRY
from tests.interop.gguf.files import write_model
from tests.interop.gguf.models import NOPE, ROPE, SCHEMES, logits, random_transformer, scaled
from tests.interop.models import make

IDS = np.random.default_rng(2).integers(0, 256, 90).tolist()  # longer than the trained length


@pytest.mark.parametrize("name", SCHEMES)
def test_export_and_import(name, tmp_path):
    """Every exported scheme is read back with its logits, and written again as it was."""
    architecture, table, settings = SCHEMES[name]
    model = random_transformer(settings)
    plan = write_gguf(model, ByteTokenizer(), tmp_path / "m.gguf")
    assert (plan.architecture, plan.divisors is not None) == (architecture, table)
    found = build_model(read_gguf(tmp_path / "m.gguf"))
    expected = logits(model, IDS)
    torch.testing.assert_close(
        logits(found.model, IDS), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )
    assert (found.shape.train_length, found.shape.vocab_size) == (64, 258)
    # Factors folded into the weights and tables of frequencies are now part of the model.
    again = write_gguf(found.model, ByteTokenizer(), tmp_path / "again.gguf")
    assert again.architecture == architecture
    first = GGUFFile(tmp_path / "m.gguf").tensors
    second = GGUFFile(tmp_path / "again.gguf").tensors
    assert first.keys() == second.keys()
    for tensor, stored in first.items():
        assert torch.equal(stored.read(), second[tensor].read()), tensor


ROUND_TRIPS = {
    "llama": ("llama", "llama", {}, {}, True),
    "tied": ("llama", "llama", {"tie_word_embeddings": True}, {}, True),
    "biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}, True),
    "yarn": (
        "llama",
        "llama",
        {},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
        True,
    ),
    "smollm3": ("smollm3", "smollm3", {}, {}, True),
    "qwen2": ("qwen2", "qwen2", {"head_dim": 4}, {}, False),
    "qwen3": ("qwen3", "qwen3", {}, {}, False),
    "phi3": ("phi3", "phi3", {"head_dim": 4}, {"rope.dimension_count": 2}, False),
    "granite": (
        "granite",
        "granite",
        {"head_dim": 4},
        {"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.3, "logit_scale": 2.0},
        True,
    ),
    "granite_swa": (
        "granite_swa",
        "granite_swa",
        {},
        {
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [False, True, False, True, False],
            "attention.rope_pattern": [True, True, False, False, True],
            "attention.scale": 0.3,
            "logit_scale": 1.0,
        },
        True,
    ),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip_is_bit_identical(name, tmp_path):
    """GGUF → our model → GGUF: the same tensors, to the bit, and the same metadata."""
    architecture, model_type, config, about, permuted = ROUND_TRIPS[name]
    theirs = make(model_type, vocab_size=258, **config)
    heads = (
        (theirs.config.num_attention_heads, theirs.config.num_key_value_heads) if permuted else None
    )
    first = GGUFFile(write_model(tmp_path / "a.gguf", architecture, theirs, about, heads=heads))
    write_gguf(build_model(read_gguf(first.path)).model, ByteTokenizer(), tmp_path / "b.gguf")
    second = GGUFFile(tmp_path / "b.gguf")
    assert first.tensors.keys() == second.tensors.keys()
    for tensor, stored in first.tensors.items():
        assert torch.equal(stored.read(), second.tensors[tensor].read()), tensor
    for key, value in first.metadata.items():
        assert second.get(key) == value, key


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0"])
def test_storage_types(dtype, tmp_path):
    model = random_transformer({"position": scaled("ntk", factor=4), "ffn_dim": 80})
    write_gguf(model, ByteTokenizer(), tmp_path / "m.gguf", dtype)
    tensors = GGUFFile(tmp_path / "m.gguf").tensors
    assert tensors["token_embd.weight"].dtype == tensors["blk.0.ffn_up.weight"].dtype == dtype
    assert tensors["blk.0.attn_norm.weight"].dtype == tensors["rope_freqs.weight"].dtype == "F32"
    # Rows of 80 numbers are not whole blocks of 32.
    assert tensors["blk.0.ffn_down.weight"].dtype == ("F16" if dtype == "Q8_0" else dtype)
    original = model.embed.weight.detach()
    kind = gguf.GGMLQuantizationType[dtype]
    expected = gguf.dequantize(gguf.quantize(original.numpy(), kind), kind)
    assert np.array_equal(tensors["token_embd.weight"].read().numpy(), expected)
    if dtype == "F32":
        assert torch.equal(tensors["token_embd.weight"].read(), original)
    found = logits(build_model(read_gguf(tmp_path / "m.gguf")).model, IDS[:32])
    error = (found - logits(model, IDS[:32])).abs().max() / found.abs().max()
    assert error < {"F32": 1e-5, "F16": 5e-3, "BF16": 0.1, "Q8_0": 0.2}[dtype]


def test_frequency_divisors(tmp_path):
    """NTK-aware scaling of base b by s divides frequency k by s^(k / (pairs − 1)): bloc97's b·s^(r/(r−2))."""
    write_gguf(
        random_transformer({"position": scaled("ntk", factor=4)}),
        ByteTokenizer(),
        tmp_path / "m.gguf",
    )
    found = GGUFFile(tmp_path / "m.gguf").tensors["rope_freqs.weight"].read().double()
    torch.testing.assert_close(found, 4.0 ** (torch.arange(8).double() / 7), rtol=1e-6, atol=0)


def test_metadata(tmp_path):
    model = random_transformer({"position": scaled("yarn", factor=4)})
    write_gguf(
        model, ByteTokenizer(), tmp_path / "m.gguf", "F16", {"name": "run 1", "description": "x"}
    )
    file = GGUFFile(tmp_path / "m.gguf")
    expected = {
        "general.name": "run 1",
        "general.description": "x",
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_F16),
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.block_count": 4,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.add_bos_token": True,
    }
    assert {key: file.get(key) for key in expected} == expected


EXPORTED = {"rope", "p_rope", "he_xu", "learned_rope", "none", "alibi"}


@pytest.mark.parametrize("name", sorted(REGISTRY.keys() - EXPORTED))
def test_other_schemes_are_refused(name):
    model = random_transformer({"position": {"name": name}})
    with pytest.raises(InteropError, match=rf"model.position.name = {name}"):
        make_plan(model)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"position": scaled("linear")}, r"model.position.scaling"),
        ({"position": scaled("dynamic")}, r"model.position.scaling"),
        ({"position": scaled("longrope", long_factor=[2.0] * 8)}, r"model.position.scaling"),
        ({"position": ROPE | {"remap": {"name": "self_extend"}}}, r"model.position.remap"),
        ({"position": ROPE | {"window": 8, "sinks": 2}}, r"model.position.sinks"),
        ({"position": ROPE | {"temperature": {"name": "log_n"}}}, r"model.position.temperature"),
        ({"position": {"name": "learned_rope", "share": "layer"}}, r"model.position.share"),
        ({"position": {"name": "alibi", "learned": True}}, r"model.position.slopes"),
        ({"position": {"name": "alibi", "slopes": [0.1, 0.2, 0.3, 0.4]}}, r"model.position.slopes"),
        ({"position": {"name": "alibi", "stretch": 2.0}}, r"model.position.stretch"),
        ({"position": {"name": "alibi", "window": 8}}, r"ALiBi and windows"),
        ({"position": ROPE | {"window": 8}, "qk_norm": True}, r"QK-norm and windows"),
        ({"position": scaled("ntk", factor=2), "qk_norm": True}, r"QK-norm and a table"),
        ({"position": NOPE, "qk_norm": True}, r"QK-norm and no positions"),
        ({"position": ROPE, "qk_norm": "all_heads"}, r"model.qk_norm"),
        ({"position": ROPE, "norm_placement": "output"}, r"model.norm_placement"),
        ({"position": ROPE, "logit_softcap": 30.0}, r"model.logit_softcap"),
        ({"position": NOPE, "mixer": {"name": "linear"}}, r"model.mixer.name"),
        ({"position": NOPE, "head_dim": 15}, r"model.head_dim"),
        (
            {"position": {"name": "pattern", "layers": ["a", "b"],
                          "kinds": {"a": ROPE, "b": ROPE | {"theta": 500.0}}}},
            r"layers with different frequencies",
        ),
        (
            {"position": {"name": "pattern", "layers": ["a", "b"],
                          "kinds": {"a": ROPE | {"window": 8}, "b": ROPE | {"window": 9}}}},
            r"layers with different windows",
        ),
        (
            {"position": {"name": "pattern", "layers": ["a", "b"],
                          "kinds": {"a": {"name": "alibi"}, "b": NOPE}}},
            r"ALiBi in some layers",
        ),
    ],
)  # fmt: skip
def test_refused_settings(settings, setting, tmp_path):
    with pytest.raises(InteropError, match=setting):
        write_gguf(random_transformer(settings), ByteTokenizer(), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_refused_paths(tmp_path):
    model = random_transformer({"position": ROPE})
    path = tmp_path / "m.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(InteropError, match="already exists"):
        write_gguf(model, ByteTokenizer(), path)
    assert path.read_bytes() == b"precious"
    with pytest.raises(InteropError, match="folder does not exist"):
        write_gguf(model, ByteTokenizer(), tmp_path / "absent" / "m.gguf")


def test_nothing_is_left_of_a_failed_export(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(InteropError, match="cannot be written"):
        write_gguf(random_transformer({"position": ROPE}), ByteTokenizer(), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())
