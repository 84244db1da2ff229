"""Small models of every family, made by transformers, an independent implementation; all sizes
differ."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.files import table

TABLE = table("interop/variants.yaml")
SMALL: dict[str, Any] = TABLE["small"]
ROPES: dict[str, dict[str, Any]] = TABLE["ropes"]
VARIANTS: dict[str, dict[str, Any]] = TABLE["variants"]
FIRST = [name for name in VARIANTS if "," not in name]  # of each family
ABSENT = "absent"  # a key that the configuration does not have


def type_of(name: str) -> str:
    """The model type of a variant."""
    return name.partition(",")[0]


def make(model_type: str, **changes) -> PreTrainedModel:
    """Weights large enough for attention, norms, biases and sinks to matter, and norms that are not
    all 1."""
    keys = {key: value for key, value in (SMALL | changes).items() if value != ABSENT}
    config = AutoConfig.for_model(model_type, **copy.deepcopy(keys))
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                # rounded, so that the sum of Gemma's weight and 1 is exact in float32
                weight.add_((0.3 * drawn * 2**12).round() / 2**12)
            else:
                weight.copy_(drawn if weight.ndim == 1 else 1.4 * drawn * weight.shape[1] ** -0.5)
        for name, weight in model.named_buffers():
            if "layer_scalar" in name:
                weight.fill_(float(1 + 0.3 * torch.randn(1, generator=generator)))
    return model


def variant(name: str, **changes) -> PreTrainedModel:
    return make(type_of(name), **(VARIANTS[name] | changes))


@contextmanager
def double_precision() -> Iterator[None]:
    """transformers computes angles, norms and softmax in float32 whatever the dtype; its own code,
    built and run within this context, computes them in float64."""
    single = torch.float32
    method = torch.Tensor.float
    default = torch.get_default_dtype()
    try:
        torch.float = torch.float32 = torch.float64
        torch.Tensor.float = torch.Tensor.double
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.float = torch.float32 = single
        torch.Tensor.float = method
        torch.set_default_dtype(default)


def in_double(theirs: PreTrainedModel) -> PreTrainedModel:
    """The model, built in float64; call it within `double_precision`."""
    with double_precision():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(theirs.config), dtype=torch.float64)
    model.load_state_dict(theirs.state_dict())
    return model.eval()
