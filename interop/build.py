"""Our model from a foreign checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from errors import InteropError
from interop.checkpoint import ForeignCheckpoint, first_names
from interop.huggingface.config import ImportedShape, read_config
from interop.huggingface.weight_names import DERIVED, weight_map
from model import Transformer

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ImportedModel:
    """A model read from elsewhere, with float32 weights, in evaluation mode."""

    model: Transformer
    shape: ImportedShape
    checkpoint: ForeignCheckpoint


def build_model(checkpoint: ForeignCheckpoint) -> ImportedModel:
    """The model of a checkpoint.

    Raises:
        InteropError: a configuration that our decoder would compute otherwise, or tensors that are
            missing, left over, damaged, or of another shape or type.
    """
    where = checkpoint.config_file
    shape = read_config(checkpoint.config, where)
    model = Transformer(
        shape.model,
        shape.vocab_size,
        shape.train_length,
        shape.original_length,
    )
    own = model.state_dict()
    if shape.family is None:
        theirs = {f"model.{name}": (name,) for name in own}
    else:
        theirs, unknown = weight_map(
            shape.family.layer,
            shape.model.layers,
            own,
        )
        assert not unknown, f"families.py maps no tensor to {unknown}"
    tensors = checkpoint.tensors
    if missing := sorted(theirs.keys() - tensors.keys()):
        tied = (
            ": if its head is the embedding, set tie_word_embeddings = true"
            if missing == [HEAD]
            else ""
        )
        raise InteropError(
            f"{where} requires {first_names(missing)}, which the weights do not have{tied}"
        )
    left = sorted(name for name in tensors.keys() - theirs.keys() if not DERIVED.fullmatch(name))
    has_copy = shape.model.tie_embeddings and left == [HEAD]
    if left and not has_copy:
        raise InteropError(
            f"{checkpoint.files[0].parent} contains {first_names(left)}, which a "
            f"{checkpoint.config['model_type']} model of this {where} does not have"
        )
    for name, parts in theirs.items():
        rows = [own[part].shape[0] for part in parts]
        expected = (sum(rows), *own[parts[0]].shape[1:])
        stored = tensors[name]
        if stored.shape != expected:
            raise InteropError(
                f"{stored.file}: {name} has shape {stored.shape}, {where} requires {expected}"
            )
        for part, values in zip(parts, stored.read().split(rows), strict=True):
            own[part].copy_(values)
    if has_copy and not torch.equal(tensors[HEAD].read(), own["embed.weight"]):
        raise InteropError(
            f"{tensors[HEAD].file}: {HEAD} differs from the embedding although {where} has "
            "tie_word_embeddings = true; one of them is wrong"
        )
    return ImportedModel(model.eval(), shape, checkpoint)
