"""GGUF files of models of transformers, written with the library `gguf` and its own table of tensor names."""

from pathlib import Path

import gguf
import numpy as np
from torch import Tensor

# `gguf` 0.19 does not know this one, but llama.cpp names its tensors as those of Granite.
GRANITE_SWA = "granite_swa"


def permute(rows: Tensor, heads: int) -> Tensor:
    """As in llama.cpp's conversion/llama.py."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def metadata(config) -> dict:
    """The keys that every architecture has."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }


def write(
    path: Path,
    architecture: str,
    state: dict[str, Tensor] | None = None,
    about: dict | None = None,
    *,
    heads: tuple[int, int] | None = None,
    extra: dict[str, Tensor] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: dict | None = None,
) -> Path:
    """Write a file.

    Args:
        state: tensors by their names in transformers.
        heads: query and key heads, if the rows of q and k are permuted.
        extra: tensors by their names in the file.
        kind: how matrices are stored.
    """
    writer = gguf.GGUFWriter(path, architecture)
    keys = {f"{architecture}.{key}": value for key, value in (about or {}).items()}
    for key, value in (
        keys | {f"tokenizer.ggml.{k}": v for k, v in (tokenizer or {}).items()}
    ).items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add.get(type(value), writer.add_array)(key, value)
    known = "granite" if architecture == GRANITE_SWA else architecture
    number = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    table = gguf.get_tensor_name_map(number, 99)
    tensors = dict(extra or {})
    for name, weight in (state or {}).items():
        if heads and any(part in name for part in ("q_proj", "k_proj")):
            weight = permute(weight, heads["k_proj" in name])
        if name.endswith("self_attn.sinks"):
            tensors[f"blk.{name.split('.')[2]}.attn_sinks.weight"] = weight
            continue
        stem, end = name.rsplit(".", 1)
        tensors[f"{table.get_name(stem)}.{end}"] = weight
    for name, weight in tensors.items():
        values = weight.detach().float().contiguous().numpy()
        stored = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path: Path, architecture: str, model, about: dict | None = None, **options) -> Path:
    """Write a model of transformers; `about` is added to its metadata."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state = {name: weight for name, weight in state.items() if name != "lm_head.weight"}
    return write(path, architecture, state, metadata(model.config) | (about or {}), **options)


def raw_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Random quantized rows: `gguf` reads K-quants but cannot write them. Scales are finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    halves = generator.normal(0, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    # Where the scales of a block are: at its start (Q4_K, Q5_K: d and dmin) or its end.
    if kind.name in ("Q4_K", "Q5_K"):
        blocks[:, :4] = halves
    elif kind.name == "Q2_K":
        blocks[:, -4:] = halves
    else:
        blocks[:, -2:] = halves[:, :2]
    return blocks.reshape(rows, columns // block * size)
