"""A GGUF file as a checkpoint in transformers' terms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from errors import InteropError
from interop.checkpoint import ForeignCheckpoint, StoredTensor, some
from interop.gguf.architectures import ROPE_FREQS, ROPE_LONG, ROPE_SHORT, names, rotated_heads
from interop.gguf.reading.config import architecture_of, read_config
from interop.gguf.reading.file import GGUFFile
from interop.gguf.reading.tokenizer import read_tokenizer
from interop.huggingface.weights import to_half


def read_gguf(path: str | Path) -> ForeignCheckpoint:
    """Read a GGUF file. Weights are read, and dequantized, on demand.

    Raises:
        InteropError: no such file, not a GGUF file, a damaged one, or an architecture, quantization,
            metadata value, tensor or tokenizer that is not supported.
    """
    file = GGUFFile(path)
    config = read_config(file)
    return ForeignCheckpoint(
        name=file.path.stem,
        config=config,
        config_file=str(file.path),
        tensors=_tensors(file, config),
        position={"name": "alibi"} if architecture_of(file).alibi else None,
        tokenizer=read_tokenizer(file, config["vocab_size"]),
    )


def _tensors(file: GGUFFile, config: dict[str, Any]) -> dict[str, StoredTensor]:
    architecture = architecture_of(file)
    known = names(architecture, config["num_hidden_layers"])
    left = sorted(file.tensors.keys() - known.keys() - {ROPE_FREQS, ROPE_LONG, ROPE_SHORT})
    if left:
        raise InteropError(
            f"{file.path} contains {some(left)}, which architecture {file.architecture} with "
            f"{config['num_hidden_layers']} layers does not have"
        )
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    found = {}
    for name, tensor in file.tensors.items():
        if name in known:
            count = rotated_heads(architecture, name, heads, kv_heads)
            found[known[name]] = _unpermuted(file, name, tensor, count) if count else tensor
    return found


def _unpermuted(file: GGUFFile, name: str, tensor: StoredTensor, heads: int) -> StoredTensor:
    if tensor.shape[0] % (2 * heads):
        raise InteropError(
            f"{file.path}: {name} has {tensor.shape[0]} rows, which {heads} heads cannot share: the metadata "
            "are those of another model"
        )
    rotated = tensor.shape[0] // heads
    return replace(tensor, read=lambda: to_half(tensor.read(), heads, rotated))
