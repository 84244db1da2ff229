"""Our model from a foreign checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from errors import InteropError
from interop.checkpoint import ForeignCheckpoint, StoredTensor, first_names
from interop.huggingface.config import ImportedShape, read_config
from interop.huggingface.reader import shown
from interop.huggingface.weight_names import DERIVED, joined, separated
from model import Transformer

HEAD = "lm_head.weight"
# Sizes in config.json, and in the settings of a generated modeling file.
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "conv_L_cache",
    "vocab_size",
    "layers",
    "dim",
    "ffn_dim",
    "heads",
    "kv_heads",
)


@dataclass(frozen=True)
class ImportedModel:
    """A model read from elsewhere, with float32 weights, in evaluation mode."""

    model: Transformer
    shape: ImportedShape
    checkpoint: ForeignCheckpoint


def build_model(checkpoint: ForeignCheckpoint) -> ImportedModel:
    """The model of a checkpoint. Nothing is allocated before every size of the configuration has
    been compared with the stored tensors.

    Raises:
        InteropError: a configuration that our decoder would compute otherwise, or tensors that are
            missing, left over, damaged, not finite, or of another shape or type.
    """
    where = checkpoint.config_file
    if checkpoint.config.get("model_type") == "olmo_hybrid":
        checkpoint = replace(checkpoint, tensors=_olmo_hybrid(checkpoint.tensors))
    _check_sizes(checkpoint)
    shape = read_config(checkpoint.config, where)
    with torch.device("meta"):
        empty = _transformer(shape).state_dict()
    if shape.family is None:
        theirs = {f"model.{name}": (name,) for name in empty}
    else:
        theirs, unknown = shape.family.weight_map(shape.model, empty)
        assert not unknown, f"families.py maps no tensor to {unknown}"
    has_copy = _check_names(checkpoint, set(theirs), shape.model.tie_embeddings)
    heads = shape.model.heads
    one_plus_norms = shape.family is not None and shape.family.one_plus_norms
    for name, parts in theirs.items():
        whole = joined(name, [empty[part] for part in parts], heads, one_plus_norms)
        expected = tuple(whole.shape)
        stored = checkpoint.tensors[name]
        if stored.shape != expected:
            raise InteropError(
                f"{stored.file}: {name} has shape {stored.shape}, {where} requires {expected}"
            )
    model = _transformer(shape)
    own = model.state_dict()
    for name, parts in theirs.items():
        stored = checkpoint.tensors[name]
        values = stored.read()
        if not values.isfinite().all():
            raise InteropError(
                f"{stored.file}: {name} has values that are not finite; download it again, or "
                "import other weights"
            )
        rows = [len(empty[part]) for part in parts]
        separate = separated(name, values, rows, heads, one_plus_norms)
        for part, own_values in zip(parts, separate, strict=True):
            own[part].copy_(own_values)
    if has_copy and not torch.equal(checkpoint.tensors[HEAD].read(), own["embed.weight"]):
        raise InteropError(
            f"{checkpoint.tensors[HEAD].file}: {HEAD} differs from the embedding although {where} "
            "has tie_word_embeddings = true; one of them is wrong"
        )
    return ImportedModel(model.eval(), shape, checkpoint)


def _olmo_hybrid(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors under the names of transformers' class: files have other names of norms, and the
    convolution of each layer in three parts."""
    renamed = {}
    for name, stored in tensors.items():
        name = name.replace("attention_layer_norm", "input_layernorm")
        renamed[name.replace("feedforward_layer_norm", "post_attention_layernorm")] = stored
    for name in [name for name in renamed if ".q_conv1d." in name]:
        names = [name.replace(".q_", f".{letter}_") for letter in "qkv"]
        if not renamed.keys() >= set(names):
            continue  # reported as missing
        parts = [renamed.pop(part) for part in names]
        rows = sum(part.shape[0] for part in parts)
        renamed[name.replace("q_conv1d", "conv1d")] = replace(
            parts[0],
            shape=(rows, *parts[0].shape[1:]),
            read=lambda parts=parts: torch.cat([part.read() for part in parts]),
        )
    return renamed


def _transformer(shape: ImportedShape) -> Transformer:
    return Transformer(shape.model, shape.vocab_size, shape.train_length, shape.original_length)


def _check_sizes(checkpoint: ForeignCheckpoint) -> None:
    """Refuse sizes that are larger than all weights together, before anything of such a size is
    computed."""
    stored = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    settings = checkpoint.config.get("settings")  # of a folder with a generated modeling file
    values = checkpoint.config | (settings if isinstance(settings, dict) else {})
    for key in SIZES:
        limit = len(checkpoint.tensors) if "layers" in key else stored
        value = values.get(key)
        if isinstance(value, int | float) and value > limit:
            raise InteropError(
                f"{checkpoint.config_file}: {key} = {shown(value)} does not fit the weights, which "
                f"have {limit:,} {'tensors' if 'layers' in key else 'values'}"
            )


def _check_names(checkpoint: ForeignCheckpoint, needed: set[str], is_tied: bool) -> bool:
    """Refuse missing and unknown tensors; returns whether there is a copy of a tied embedding."""
    where = checkpoint.config_file
    if missing := sorted(needed - checkpoint.tensors.keys()):
        fix = ": if its head is the embedding, set tie_word_embeddings = true"
        raise InteropError(
            f"{where} requires {first_names(missing)}, which the weights do not have"
            f"{fix if missing == [HEAD] else ''}"
        )
    left = sorted(
        name for name in checkpoint.tensors.keys() - needed if not DERIVED.fullmatch(name)
    )
    has_copy = is_tied and left == [HEAD]
    if left and not has_copy:
        raise InteropError(
            f"{checkpoint.files[0].parent} contains {first_names(left)}, which a "
            f"{checkpoint.config['model_type']} model of this {where} does not have"
        )
    return has_copy
