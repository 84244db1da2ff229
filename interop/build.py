"""Our model from a foreign checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from errors import InteropError
from interop.checkpoint import ForeignCheckpoint, first_names
from interop.huggingface.config import ImportedShape, read_config
from interop.huggingface.reader import shown
from interop.huggingface.weight_names import DERIVED, ONE_PLUS_NORM, weight_map
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
    _check_sizes(checkpoint)
    shape = read_config(checkpoint.config, where)
    with torch.device("meta"):
        empty = _transformer(shape).state_dict()
    if shape.family is None:
        theirs = {f"model.{name}": (name,) for name in empty}
    else:
        theirs, unknown = weight_map(shape.family.layer, shape.model.layers, empty)
        assert not unknown, f"families.py maps no tensor to {unknown}"
    has_copy = _check_names(checkpoint, set(theirs), shape.model.tie_embeddings)
    rows_of = {name: [empty[part].shape[0] for part in parts] for name, parts in theirs.items()}
    for name, parts in theirs.items():
        expected = (sum(rows_of[name]), *empty[parts[0]].shape[1:])
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
        if shape.family and shape.family.one_plus_norms and ONE_PLUS_NORM.fullmatch(name):
            values += 1
        for part, own_values in zip(parts, values.split(rows_of[name]), strict=True):
            own[part].copy_(own_values)
    if has_copy and not torch.equal(checkpoint.tensors[HEAD].read(), own["embed.weight"]):
        raise InteropError(
            f"{checkpoint.tensors[HEAD].file}: {HEAD} differs from the embedding although {where} "
            "has tie_word_embeddings = true; one of them is wrong"
        )
    return ImportedModel(model.eval(), shape, checkpoint)


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
