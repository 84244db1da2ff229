"""`gguf:FILE`: the weights and ids of the original, and what is refused before anything is
built."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import sentencepiece
import tokenizers
import torch
from tokenizers import pre_tokenizers
from torch import Tensor

from data.preparation.tokenizer_training import train_tokenizer
from data.tokenizers import load_folder_tokenizer
from data.tokenizers.tokenizer_settings import HuggingFaceSettings
from errors import InteropError
from interop.build import build_model
from interop.gguf import converted_gguf
from interop.huggingface.folder import read_folder
from interop.runs import run_of
from run_directory.run import Run
from tests.files import table
from tests.interop.models import make
from tests.sentencepiece_models import LOSSLESS_BPE, sentencepiece_model

TEXTS = [
    "Once upon a time, in 1984,  there were 12,345.67 of them.\n\n   Don't! We'll see\tYOU'LL\r\n "
    "see.",
    "Ünïcödé naïve façade — „Zitat“, 日本語のテキスト, 한국어, русский, 🙂🙃 e\u0301.",
    " leading and trailing  ",
]


def metadata(config) -> dict:
    """The keys that every architecture has."""
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Adjacent features are rotated together, as llama.cpp's conversion/llama.py writes a Llama."""
    halves = rows.unflatten(0, (heads, 2, -1))
    return halves.swapaxes(1, 2).flatten(0, 2)


def write(
    path: Path,
    architecture: str,
    theirs,
    changes: dict | None = None,
    tokenizer: dict | None = None,
    extra: dict[str, Tensor] | None = None,
) -> Path:
    """Write a model of transformers with the package gguf; `changes` of the metadata."""
    config = theirs.config
    keys = {f"{architecture}.{k}": v for k, v in (metadata(config) | (changes or {})).items()}
    keys |= {f"tokenizer.ggml.{key}": value for key, value in (tokenizer or {}).items()}
    writer = gguf.GGUFWriter(path, architecture)
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in keys.items():
        add = getattr(writer, f"add_{kinds[type(value)]}")
        add(key, value)
    number = gguf.MODEL_ARCH[architecture.upper()]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in theirs.state_dict().items():
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            weight = permuted(weight, heads[part])
        stem, end = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(stem)}.{end}", weight.contiguous().numpy())
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_weights_and_settings_equal_those_of_the_original(model_type, tmp_path):
    theirs = make(model_type, head_dim=4)
    theirs.save_pretrained(tmp_path / "original")
    expected = build_model(read_folder(tmp_path / "original"))
    file = write(tmp_path / "m.gguf", model_type, theirs)
    with converted_gguf(file) as checkpoint:
        assert checkpoint.files == [file]
        imported = build_model(checkpoint)
    eps = imported.shape.model.norm_eps  # float32 in the file
    assert eps == pytest.approx(expected.shape.model.norm_eps)
    assert imported.shape.model == expected.shape.model.model_copy(update={"norm_eps": eps})
    assert imported.shape.train_length == 64
    torch.testing.assert_close(
        imported.model.state_dict(), expected.model.state_dict(), rtol=0, atol=0
    )


CORPUS = [*TEXTS, *" ".join(TEXTS).split(" ")] * 3


@pytest.fixture(scope="module")
def theirs():
    return make("llama", vocab_size=500)


@pytest.mark.parametrize(
    ("name", "settings", "add_bos"),
    [
        ("gpt-2", {"pre_tokenizer": "gpt2", "split_digits": False}, False),
        ("smollm", {"pre_tokenizer": "gpt2"}, False),
        ("qwen2", {}, False),
        ("llama-bpe", {"split_digits": False}, True),
    ],
)
def test_byte_level_bpe(name, settings, add_bos, theirs, tmp_path):
    trained = train_tokenizer(HuggingFaceSettings(vocab_size=340, **settings), CORPUS)
    expected = tokenizers.Tokenizer.from_buffer(trained.content)
    vocabulary = expected.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(expected.to_str())["model"]["merges"]
    keys = {
        "model": "gpt2",
        "pre": name,
        "tokens": tokens,
        "token_type": [1 + 2 * (i < 2) for i in range(len(tokens))],
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "eot_token_id": 7,
    }
    with converted_gguf(write(tmp_path / "m.gguf", "llama", theirs, tokenizer=keys)) as checkpoint:
        imported = load_folder_tokenizer(checkpoint.tokenizer.parent)
    assert (imported.bos_id, imported.eos_id, imported.add_bos) == (0, 1, add_bos)
    assert set(imported.eos_ids) == {1, 7}
    for text in TEXTS:
        ids = expected.encode(text, add_special_tokens=False).ids
        assert imported.encode(text) == ids
        assert imported.decode(ids) == text


def test_sentencepiece(theirs, tmp_path):
    model = sentencepiece_model(CORPUS, 450, character_coverage=0.98, **LOSSLESS_BPE)
    expected = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(expected.vocab_size())
    kinds = {0: 2, 1: 3, 2: 3}  # unknown, and two control symbols
    keys = {
        "model": "llama",
        "tokens": [expected.id_to_piece(i) for i in ids],
        "scores": [expected.get_score(i) for i in ids],
        "token_type": [6 if expected.is_byte(i) else kinds.get(i, 1) for i in ids],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with converted_gguf(write(tmp_path / "m.gguf", "llama", theirs, tokenizer=keys)) as checkpoint:
        imported = load_folder_tokenizer(checkpoint.tokenizer.parent)
    assert (imported.bos_id, imported.eos_id, imported.add_bos) == (1, 2, True)
    for text in TEXTS:
        assert imported.encode(text) == expected.encode(text)


def refused(file: Path, match: str) -> None:
    with pytest.raises(InteropError, match=match), converted_gguf(file) as checkpoint:
        build_model(checkpoint)


REFUSED = table("interop/refusals.yaml")


@pytest.mark.parametrize(("changes", "match"), REFUSED["gguf"], ids=str)
def test_metadata_are_checked_before_anything_is_built(
    changes, match, theirs, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "interop.gguf._convert_weights", lambda header, folder: pytest.fail("built")
    )
    refused(write(tmp_path / "m.gguf", "llama", theirs, changes), match)


def without(model, name: str) -> SimpleNamespace:
    """A model that lacks a tensor."""
    state = {key: weight for key, weight in model.state_dict().items() if key != name}
    return SimpleNamespace(config=model.config, state_dict=lambda: state)


def test_tensors_and_tokenizers_that_cannot_be_imported(theirs, tmp_path):
    file = tmp_path / "m.gguf"
    for name in ("rope_freqs.weight", "blk.0.attn_q.bias"):
        refused(write(file, "llama", theirs, extra={name: torch.ones(60)}), name)
    smaller = without(theirs, "model.layers.1.mlp.up_proj.weight")
    refused(write(file, "llama", smaller), "blk.1.ffn_up.weight")
    keys = {"model": "gpt2", "pre": "future", "tokens": ["a"], "merges": []}
    refused(write(file, "llama", theirs, tokenizer=keys), "tokenizer.ggml.pre = 'future'")
    writer = gguf.GGUFWriter(file, "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(file, "general.architecture = 'gemma2'")


def test_damaged_files(theirs, tmp_path):
    file = write(tmp_path / "m.gguf", "llama", theirs)
    whole = file.read_bytes()
    entry = struct.pack("<Q", 17) + b"token_embd.weight"
    sizes = whole.index(entry) + len(entry) + 4

    def changed(at: int, code: str, value: int) -> bytes:
        content = bytearray(whole)
        struct.pack_into(code, content, at, value)
        return bytes(content)

    cut = [*range(4, 2400, 97), *range(2400, len(whole), 9001), len(whole) - 40]
    contents = [(whole[:size], "truncated") for size in cut]
    contents += [(content, "not a GGUF file") for content in (b"", b"{}", b"PK\x03\x04rest")]
    contents += [
        (changed(4, "<I", 1), "version 1"),
        (changed(sizes, "<Q", 1 << 60), "truncated"),  # elements of a row
        (changed(sizes + 16, "<I", 999), "type 999"),
        (changed(sizes + 20, "<Q", 1 << 62), "truncated"),  # offset
    ]
    for content, match in contents:
        file.write_bytes(content)
        refused(file, match)


@pytest.mark.parametrize("count", [1 << 20, (1 << 64) - 1])
@pytest.mark.parametrize("kind", [4, 8, 9, 77])
def test_hostile_lengths(count, kind, tmp_path):
    """A length beyond the file is refused at once, whatever it counts."""
    file = tmp_path / "m.gguf"
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    array = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, count)
    counts = b"GGUF" + struct.pack("<IQQ", 3, count, count)
    key = start + struct.pack("<Q", count)
    for content in (start + array, counts, key):
        file.write_bytes(content + bytes(64))
        refused(file, "truncated")


def test_a_run_of_a_file(theirs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|endoftext|>"],
        "merges": ["a b"],
    }
    write(tmp_path / "small.gguf", "llama", make("llama", vocab_size=258), tokenizer=keys)
    run = Run.open(run_of("gguf:small.gguf")).load()
    assert run.folder.name.startswith("small-")
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert manifest["imported_from"] == ["small.gguf"]
    assert run.tokenizer.decode(run.tokenizer.encode("né")) == "né"
    with pytest.raises(InteropError, match=r"absent\.gguf"):
        run_of("gguf:absent.gguf")
