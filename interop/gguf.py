"""GGUF files, converted by transformers to a Hugging Face folder and imported from there."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from errors import InteropError
from interop.checkpoint import ForeignCheckpoint, first_names
from interop.extras import load_extra
from interop.gguf_header import GGUFHeader, read_header
from interop.huggingface.folder import read_folder

OUTER = ("token_embd.weight", "output_norm.weight")
LAYER = (
    "attn_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "ffn_norm.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
)
# `general.architecture`, which is also transformers' model type -> tensors of a layer besides LAYER
ARCHITECTURES = {
    "llama": (),
    "qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "qwen3": ("attn_q_norm.weight", "attn_k_norm.weight"),
}
# Metadata that transformers' reader ignores, with the values that change nothing.
IGNORED = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "expert_count": (0,),
}
# Pre-tokenizers of byte-level BPE (`tokenizer.ggml.pre`) whose text is split as llama.cpp does.
GPT2_SPLITS = ("gpt-2", "phi-2", "olmo", "mpt")
QWEN2_SPLITS = ("qwen2", "deepseek-r1-qwen", "megrez")
LLAMA3_SPLITS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")


@contextmanager
def converted_gguf(file: Path) -> Iterator[ForeignCheckpoint]:
    """A GGUF file as a checkpoint, whose weights can be read until the block ends.

    Raises:
        InteropError: a damaged file, or one of which transformers' reader would lose something.
    """
    header = read_header(file)
    check_header(header)
    with TemporaryDirectory(prefix="gguf-") as name:
        folder = Path(name)
        _convert_weights(header, folder)
        if header.metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab"):
            _convert_tokenizer(header, folder)
        checkpoint = read_folder(folder, file.stem)
        yield replace(checkpoint, config_file=str(file), converted_from=file)


def check_header(header: GGUFHeader) -> None:
    """Check what transformers' reader ignores, and the sizes that it would allocate.

    Raises:
        InteropError: naming the key or tensor.
    """
    metadata = header.metadata
    file = header.path
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise InteropError(
            f"{file}: general.architecture = {architecture!r} cannot be imported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    for key, neutral in IGNORED.items():
        value = metadata.get(f"{architecture}.{key}")
        if value is not None and value not in neutral:
            raise InteropError(
                f"{file}: {architecture}.{key} = {value!r} cannot be imported, because "
                "transformers' reader ignores it; import the original model instead"
            )
    layers = header.size(f"{architecture}.block_count")
    if layers > len(header.shapes):
        raise InteropError(
            f"{file}: {architecture}.block_count is {layers}, more than it has tensors"
        )
    in_layer = LAYER + ARCHITECTURES[architecture]
    names = {*OUTER, *(f"blk.{i}.{name}" for i in range(layers) for name in in_layer)}
    if missing := sorted(names - header.shapes.keys()):
        raise InteropError(f"{file} has no {first_names(missing)}, which its metadata require")
    if ignored := sorted(header.shapes.keys() - names - {"output.weight"}):
        raise InteropError(
            f"{file}: {first_names(ignored)} cannot be imported, because transformers' reader "
            f"ignores such tensors of architecture {architecture}; import the original model "
            "instead"
        )
    heads = header.size(f"{architecture}.attention.head_count")
    kv_heads = header.size(f"{architecture}.attention.head_count_kv", heads)
    dim = header.size(f"{architecture}.embedding_length")
    ffn_dim = header.size(f"{architecture}.feed_forward_length")
    head_dim = header.size(f"{architecture}.attention.key_length", max(1, dim // heads))
    expected = {
        "token_embd.weight": (header.shapes["token_embd.weight"][0], dim),
        "blk.0.attn_q.weight": (heads * head_dim, dim),
        "blk.0.attn_k.weight": (kv_heads * head_dim, dim),
        "blk.0.ffn_up.weight": (ffn_dim, dim),
    }
    for name, shape in expected.items():
        if header.shapes.get(name) != shape:
            raise InteropError(
                f"{file}: {name} has shape {header.shapes.get(name)}, the metadata require {shape}"
            )
    if header.size(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise InteropError(f"{file}: {architecture}.rope.dimension_count must be {head_dim}")


def _convert_weights(header: GGUFHeader, folder: Path) -> None:
    """Write config.json and model.safetensors."""
    transformers = load_extra("transformers")
    file = header.path
    architecture = header.metadata["general.architecture"]
    try:
        config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        if config.model_type != architecture:
            raise InteropError(
                f"{file}: transformers reads architecture {architecture} as {config.model_type}; "
                "change general.name"
            )
        config.vocab_size = header.shapes["token_embd.weight"][0]
        if architecture == "qwen3":  # whose head_dim transformers does not read
            config.head_dim = header.shapes["blk.0.attn_q.weight"][0] // config.num_attention_heads
        settings = config.to_dict() | _control_ids(header)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, config=config, dtype=torch.float32
        )
    except InteropError:
        raise
    except Exception as error:  # whatever a foreign file makes the library raise
        raise InteropError(f"{file}: transformers cannot read it ({error})") from error
    weights = model.state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def _control_ids(header: GGUFHeader) -> dict[str, Any]:
    """BOS and the end tokens of the file; transformers has the defaults of the class instead."""
    ids = {
        key: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot")
    }
    ends = [ids[key] for key in ("eos", "eot") if ids[key] is not None]
    return {"bos_token_id": ids["bos"], "eos_token_id": list(dict.fromkeys(ends)) or None}


def _convert_tokenizer(header: GGUFHeader, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    transformers = load_extra("transformers")
    file = header.path
    is_sentencepiece = header.metadata["tokenizer.ggml.model"] == "llama"
    split = header.metadata.get("tokenizer.ggml.pre")
    known = GPT2_SPLITS + QWEN2_SPLITS + LLAMA3_SPLITS + DIGIT_SPLITS
    if not is_sentencepiece and split not in known:
        raise InteropError(
            f"{file}: tokenizer.ggml.pre = {split!r} cannot be imported; supported are "
            f"{', '.join(known)}"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # whatever a foreign file makes the library raise
        raise InteropError(f"{file}: transformers cannot read its tokenizer ({error})") from error
    settings = folder / "tokenizer_config.json"
    has_bos = header.metadata.get(
        "tokenizer.ggml.add_bos_token", is_sentencepiece or split in LLAMA3_SPLITS
    )
    content = json.loads(settings.read_text(encoding="utf-8")) | {"add_bos_token": has_bos}
    settings.write_text(json.dumps(content), encoding="utf-8")
    library = load_extra("tokenizers")
    made = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if is_sentencepiece:
        # A space before text that begins with one, as sentencepiece inserts it.
        steps = [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
        made.normalizer = library.normalizers.Sequence(steps)
        made.pre_tokenizer = None
    elif split in DIGIT_SPLITS:
        digits = library.pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = library.pre_tokenizers.Sequence([digits, made.pre_tokenizer])
    else:
        made.model.ignore_merges = split in LLAMA3_SPLITS
    made.save(str(folder / "tokenizer.json"))
