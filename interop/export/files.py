"""config.json, weights and, where no class of transformers represents the model, its modeling
file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.files import write_json, write_text
from interop.export import generated, native
from interop.export.classes import ClassChoice
from interop.extras import load_extra
from model import Transformer
from training.train_state import weights_of


def write_model(
    model: Transformer, choice: ClassChoice, folder: Path, controls: dict[str, Any]
) -> None:
    """Write what transformers loads a model from, with weights in the model's dtype.

    Args:
        controls: ids of control symbols. Null ones belong to it, because some classes have other
            defaults.
    """
    state = weights_of(model)
    if choice.model_type is None:
        config = generated.config(model)
        tensors = generated.weights(state)
        write_text(folder / f"{generated.MODULE}.py", generated.source(model.settings))
    else:
        config = native.config(model, choice)
        tensors = native.weights(model, state, choice)
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    write_json(folder / "config.json", config | controls | {"dtype": dtype, "use_cache": True})
    load_extra("huggingface_hub").save_torch_state_dict(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder
    )
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # the library makes them private
