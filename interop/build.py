"""Our model from a foreign checkpoint."""

import math
from dataclasses import dataclass, replace

import torch

from errors import InteropError
from interop.checkpoint import ForeignCheckpoint, StoredTensor, first_names
from interop.huggingface.config import ImportedShape, read_config
from interop.huggingface.families import Family
from interop.huggingface.reader import Stored
from interop.huggingface.weight_names import (
    DERIVED,
    by_part,
    joined,
    separated,
)
from model import Transformer

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ImportedModel:
    """A model from another codebase, with float32 weights, in evaluation mode."""

    model: Transformer
    shape: ImportedShape
    checkpoint: ForeignCheckpoint


def build_model(checkpoint: ForeignCheckpoint) -> ImportedModel:
    """The model of a checkpoint. Every size of the configuration is compared with the stored
    tensors before anything is allocated.

    Raises:
        InteropError: our decoder would compute the configuration differently, or tensors are
            missing, left over, damaged, not finite, or of another shape or type.
    """
    where = checkpoint.config_file
    numbers = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    limits = Stored(len(checkpoint.tensors), numbers)
    shape = read_config(checkpoint.config, where, limits)
    with torch.device("meta"):
        model = _transformer(shape)
    empty = model.state_dict()
    if shape.family is None:
        theirs = {f"model.{name}": [name] for name in empty}
    else:
        empty = by_part(empty, model)
        theirs, unknown = shape.family.weight_map(model.settings, empty)
        assert not unknown, f"families.yaml maps no tensor to {unknown}"
        checkpoint = replace(checkpoint, tensors=_in_class(checkpoint, shape.family))
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
    own |= by_part(own, model)
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


def _in_class(checkpoint: ForeignCheckpoint, family: Family) -> dict[str, StoredTensor]:
    """The tensors by their names in transformers' class, which differ from the names in some
    files."""
    tensors = dict(checkpoint.tensors)
    for ours, theirs in family.renamed.items():
        tensors = {name.replace(ours, theirs): stored for name, stored in tensors.items()}
    for name in [name for name in tensors if ".q_conv1d." in name]:
        names = [name.replace(".q_", f".{letter}_") for letter in "qkv"]
        if not tensors.keys() >= set(names):
            continue  # reported as missing later
        parts = [tensors.pop(part) for part in names]
        tensors[name.replace("q_conv1d", "conv1d")] = replace(
            parts[0],
            shape=(sum(part.shape[0] for part in parts), *parts[0].shape[1:]),
            read=lambda parts=parts: torch.cat([part.read() for part in parts]),
        )
    if "attention_k_eq_v" in family.defaults and checkpoint.config.get("attention_k_eq_v"):
        for name in [name for name in tensors if ".self_attn.k_proj." in name]:
            tensors.setdefault(name.replace("k_proj", "v_proj"), tensors[name])
    return tensors


def _transformer(shape: ImportedShape) -> Transformer:
    return Transformer(shape.model, shape.vocab_size, shape.train_length, shape.original_length)


def _check_names(checkpoint: ForeignCheckpoint, needed: set[str], is_tied: bool) -> bool:
    """Refuse missing and unknown tensors. Returns whether the checkpoint has a copy of a tied
    embedding."""
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
