"""Which class of transformers represents a model exactly, and why none does.

A class qualifies if the model's settings, written as its config.json, are read as the same model
again. Models without such a class are exported with a generated modeling file.
"""

import itertools

from errors import InteropError
from interop.export.described import ClassChoice, DescribedModel, NotRepresentable
from interop.export.native import write_config
from interop.huggingface.config import read_config
from interop.huggingface.families import FAMILIES
from model import Transformer


def choose_class(model: Transformer) -> ClassChoice:
    """The class of transformers that represents a model exactly."""
    try:
        ours = DescribedModel.of_model(model)
    except NotRepresentable as reason:
        return ClassChoice(None, str(reason))
    nearest: tuple[str, list[str]] | None = None
    for model_type, native_rope in itertools.product(FAMILIES, (True, False)):
        config = write_config(ours, model_type, native_rope)
        if config is None:
            continue
        try:
            theirs = DescribedModel.of_shape(read_config(config, "config.json"))
        except InteropError:
            continue
        differing = ours.differences(theirs)
        if not differing:
            return ClassChoice(model_type, "", config, ours, theirs)
        if nearest is None or len(differing) < len(nearest[1]):
            nearest = model_type, differing
    if nearest is None:
        return ClassChoice(None, "no class has these mixers, or none without attention")
    name, differing = nearest
    return ClassChoice(None, f"the nearest class, {name}, differs in {', '.join(differing)}")
