"""GGUF files that are damaged, hostile or not supported."""

import struct
import sys

import gguf
import numpy as np
import pytest
import torch

from errors import InteropError
from interop import build_model
from interop.gguf import read_gguf
from interop.gguf.reading.file import GGUFFile
from tests.interop.gguf.files import metadata, write, write_model
from tests.interop.models import make


@pytest.fixture(scope="module")
def theirs():
    return make("llama")


@pytest.fixture
def path(theirs, tmp_path):
    return write_model(tmp_path / "m.gguf", "llama", theirs, heads=(6, 2))


def refused(path, match: str) -> None:
    with pytest.raises(InteropError, match=match):
        build_model(read_gguf(path))


def test_truncated_at_every_place(path):
    """In the metadata, in the table of tensors and in the tensors."""
    whole = path.read_bytes()
    for size in [*range(4, 2400, 97), *range(2400, len(whole), 4001), len(whole) - 40]:
        path.write_bytes(whole[:size])
        refused(path, "truncated")


def test_other_files(path, tmp_path):
    for content, match in (
        (b"", "not a GGUF file"),
        (b"{}", "not a GGUF file"),
        (b"PK\x03\x04rest", "is a pickle"),
        (b"\x80\x04\x95rest", "is a pickle"),
    ):
        path.write_bytes(content)
        refused(path, match)
    refused(tmp_path / "absent.gguf", "is not a file")
    refused(tmp_path, "is not a file")


def test_versions(path):
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", 1)
    path.write_bytes(content)
    refused(path, "version 1")
    content[4:8] = struct.pack(">I", 3)  # big-endian
    path.write_bytes(content)
    refused(path, "version")


@pytest.mark.parametrize("count", [1 << 20, 1 << 60, (1 << 64) - 1])
@pytest.mark.parametrize("kind", [0, 4, 8, 9, 77])
def test_hostile_array_lengths(count, kind, tmp_path):
    """A length beyond the file is refused at once, whatever it counts."""
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    path = tmp_path / "m.gguf"
    path.write_bytes(
        header + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, count) + b"\0" * 64
    )
    refused(path, "truncated")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, count))
    refused(path, "truncated")
    path.write_bytes(header + struct.pack("<Q", count) + b"a" * 64)
    refused(path, "truncated")


def test_duplicate_names(tmp_path):
    entry = struct.pack("<Q", 1) + b"a" + struct.pack("<IB", 0, 7)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry * 2)
    refused(tmp_path / "m.gguf", "key a occurs twice")
    entry = struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 1, 0, 0)
    (tmp_path / "m.gguf").write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + entry * 2 + b"\0" * 64
    )
    refused(tmp_path / "m.gguf", "same name")


@pytest.mark.parametrize("kind", ["IQ4_XS", "TQ1_0", "I32"])
def test_unsupported_quantizations(kind, tmp_path):
    number = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[number][1]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, size), np.uint8), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "m.gguf", f"blk.0.attn_q.weight is stored as {kind}")


def test_unknown_quantization(path):
    """A type that the installed `gguf` does not know."""
    content = path.read_bytes()
    name = b"token_embd.weight"
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 16
    assert struct.unpack_from("<I", content, at) == (0,)
    path.write_bytes(content[:at] + struct.pack("<I", 999) + content[at + 4 :])
    refused(path, "token_embd.weight is stored as type 999")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"embedding_length": 32}, r"has shape"),
        ({"feed_forward_length": 45}, r"has shape"),
        ({"block_count": 4}, r"contains blk.4"),
        ({"block_count": 6}, r"requires model.layers.5"),
        ({"vocab_size": 54}, r"54"),
        ({"attention.head_count": 4}, r"cannot share|has shape"),
        ({"attention.head_count_kv": 3}, r"cannot share|has shape"),
        ({"attention.key_length": 8}, r"attention.value_length"),
        ({"rope.dimension_count": 8}, r"rope.dimension_count"),
        ({"attention.head_count": 0}, r"attention.head_count"),
        ({"attention.head_count": [6, 6, 5]}, r"different for each layer"),
        ({"attention.layer_norm_rms_epsilon": -1.0}, r"layer_norm_rms_epsilon"),
        ({"attention.layer_norm_rms_epsilon": "x"}, r"layer_norm_rms_epsilon"),
        ({"context_length": None}, r"llama.context_length"),
        ({"expert_count": 8}, r"llama.expert_count"),
        ({"rope.scaling.type": "longrope"}, r"without its factors"),
        ({"rope.scaling.type": "cubic"}, r"'cubic'"),
        ({"rope.scaling.type": 3}, r"rope.scaling.type"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, r"original_context_length"),
    ],
)
def test_metadata_that_disagree(change, match, theirs, tmp_path):
    about = {
        key: value for key, value in (metadata(theirs.config) | change).items() if value is not None
    }
    refused(write(tmp_path / "m.gguf", "llama", theirs.state_dict(), about, heads=(6, 2)), match)


def test_equal_lists_are_numbers(theirs, tmp_path):
    """Some converters write one value per layer."""
    about = metadata(theirs.config) | {"attention.head_count": [6, 6, 6]}
    path = write(tmp_path / "m.gguf", "llama", theirs.state_dict(), about, heads=(6, 2))
    assert read_gguf(path).config["num_attention_heads"] == 6


def test_missing_and_unknown_tensors(theirs, tmp_path):
    state = theirs.state_dict()
    about = metadata(theirs.config)
    less = {name: weight for name, weight in state.items() if "layers.1.mlp.up" not in name}
    refused(write(tmp_path / "a.gguf", "llama", less, about, heads=(6, 2)), r"layers.1.mlp.up_proj")
    more = {"blk.0.attn_rel_b.weight": torch.ones(3, 4)}
    refused(
        write(tmp_path / "b.gguf", "llama", state, about, heads=(6, 2), extra=more),
        r"blk.0.attn_rel_b.weight",
    )
    less = {name: weight for name, weight in state.items() if "embed_tokens" not in name}
    refused(write(tmp_path / "c.gguf", "llama", less, about, heads=(6, 2)), r"token_embd.weight")


@pytest.mark.parametrize(
    ("architecture", "extra", "match"),
    [
        ("llama", {"rope_freqs.weight": torch.ones(4)}, r"rope_freqs.weight has shape \(4,\)"),
        ("llama", {"rope_factors_long.weight": torch.ones(5)}, r"rope_factors_short.weight"),
        ("qwen2", {"rope_freqs.weight": torch.ones(5)}, r"not used by architecture qwen2"),
    ],
)
def test_invalid_tables_of_frequencies(architecture, extra, match, theirs, tmp_path):
    state = theirs.state_dict()
    about = metadata(theirs.config)
    refused(
        write(tmp_path / "m.gguf", architecture, state, about, heads=(6, 2), extra=extra), match
    )


@pytest.mark.parametrize("architecture", ["gemma2", "mamba", "bert"])
def test_other_architectures(architecture, tmp_path):
    path = write(tmp_path / "m.gguf", architecture, extra={"token_embd.weight": torch.ones(3, 4)})
    refused(path, rf"general.architecture = '{architecture}'")


def test_missing_package(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(path, r"pip install -e '.\[interop\]'")


def test_offset_beyond_the_file(path):
    content = path.read_bytes()
    name = b"token_embd.weight"
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 16 + 4
    path.write_bytes(content[:at] + struct.pack("<Q", 1 << 62) + content[at + 8 :])
    refused(path, "truncated")


def test_alignment(path):
    assert GGUFFile(path).get("general.alignment") is None
    entry = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 3)
    content = path.read_bytes()
    count = struct.unpack_from("<Q", content, 16)[0]
    path.write_bytes(content[:16] + struct.pack("<Q", count + 1) + entry + content[24:])
    refused(path, "general.alignment = 3")
