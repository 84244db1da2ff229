"""Settings that other model families need: biases, norms of outputs, joint QK-norm, multipliers."""

from typing import Any

import torch

from model import ModelSettings, Transformer
from run_directory.run_settings import RunSettings
from settings.load import identity
from tests.model.zoo import V, settings_of

EVERYTHING: dict[str, Any] = {
    "qk_norm": "all_heads",
    "norm_placement": "output",
    "attention_bias": "all",
    "mlp_bias": True,
    "value_norm": True,
    "layer_scale": True,
    "activation": "gelu_tanh",
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logit_divisor": 2.5,
}
DEFAULTS: dict[str, Any] = {
    "qk_norm": False,
    "norm_placement": "input",
    "attention_bias": "none",
    "mlp_bias": False,
    "value_norm": False,
    "layer_scale": False,
    "activation": "silu",
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logit_divisor": 1.0,
}


def build(**changes) -> Transformer:
    settings = settings_of({"name": "rope"}).model_copy(update=changes)
    return Transformer(settings, V, 11).initialize(3).double().eval()


def test_defaults_leave_weights_and_identity_unchanged():
    plain = build()
    stated = build(**DEFAULTS)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), stated.parameters(), strict=True)
    )
    assert not [name for name, _ in plain.named_parameters() if "bias" in name]
    run = RunSettings()
    stated = run.model_copy(update={"model": ModelSettings.model_validate(DEFAULTS)})
    assert identity(stated) == identity(run)
    for key, value in EVERYTHING.items():
        changed = ModelSettings.model_validate({key: value})
        assert identity(run.model_copy(update={"model": changed})) != identity(run), key
