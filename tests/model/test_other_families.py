"""Settings that other model families need: biases, norms of outputs, joint QK-norm, multipliers."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from model import ModelSettings, TokenPositions, Transformer
from run_directory.run_settings import RunSettings
from settings.load import identity
from tests.model.zoo import C, D, G, H, T, V, close, ids, randomized, settings_of
from training.optim.optimizer import role_of

EVERYTHING: dict[str, Any] = {
    "qk_norm": "all_heads",
    "norm_placement": "output",
    "attention_bias": "all",
    "mlp_bias": True,
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
    "activation": "silu",
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logit_divisor": 1.0,
}


def build(**changes) -> Transformer:
    settings = settings_of({"name": "rope"}).model_copy(update=changes)
    return Transformer(settings, V, 11).initialize(3).double().eval()


@torch.no_grad()
@pytest.mark.parametrize("placement", ["output", "both"])
def test_first_block_by_hand(placement):
    """One block with every setting, from its weights, for the first token: attention returns its
    value."""
    model = randomized(build(**EVERYTHING | {"norm_placement": placement}))
    tokens = ids(1, 1)
    seen = []
    model.layers[0].register_forward_hook(
        lambda block, inputs, output: seen.append((inputs[0], output))
    )
    model(tokens, TokenPositions.plain(1))
    x, found = seen[0]
    w = {name: weight.detach() for name, weight in model.layers[0].named_parameters()}
    close(x, 3.0 * model.embed(tokens))

    def norm(x, name):
        return (
            x
            / (x.square().mean(-1, keepdim=True) + model.settings.norm_eps).sqrt()
            * w[f"{name}.weight"]
        )

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    of_input, of_output = {
        "output": ((lambda x, name: x), "norm"),
        "both": (norm, "output_norm"),
    }[placement]
    normed = of_input(x, "attention_norm")
    value = linear(normed, "attention.wv").view(1, 1, G, 1, D).expand(1, 1, G, H // G, D).flatten(2)
    y = x + 0.4 * norm(linear(value, "attention.wo"), f"attention_{of_output}")
    normed = of_input(y, "mlp_norm")
    gate = linear(normed, "mlp.gate")
    gelu = 0.5 * gate * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
    mlp = linear(gelu * linear(normed, "mlp.up"), "mlp.down")
    close(found, y + 0.4 * norm(mlp, f"mlp_{of_output}"))


@torch.no_grad()
def test_joint_qk_norm_by_hand():
    attention = randomized(build(qk_norm="all_heads", attention_bias="qkv")).layers[0].attention
    x = torch.randn(2, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    keys = x @ attention.wk.weight.T + attention.wk.bias
    scale = (keys.square().mean(-1, keepdim=True) + attention.k_norm.eps).rsqrt()  # over all heads
    expected = (keys * scale * attention.k_norm.weight).unflatten(-1, (G, D)).transpose(1, 2)
    close(attention.keys(x), expected)
    assert attention.wo.bias is None


def test_initial_values_and_roles():
    model = build(**EVERYTHING)
    parameters = dict(model.named_parameters())
    biases = [name for name in parameters if name.endswith(".bias")]
    assert len(biases) == 7 * model.settings.layers
    assert all(not parameters[name].any() for name in biases)
    # without weight decay
    assert {role_of(name, parameters[name]) for name in biases} == {"vectors"}
    assert all((weight == 1).all() for name, weight in parameters.items() if "norm" in name)


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


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_multiplier": 0.2, "mup": {"base_dim": 8, "base_head_dim": 4}},
        {"attention_multiplier": 0.2, "mixer": {"name": "linear"}},
        {"residual_multiplier": 0.0},
        {"logit_divisor": float("inf")},
        {"attention_bias": True},
        {"norm_placement": "between"},
        {"activation": "relu"},
    ],
    ids=str,
)
def test_invalid_settings(changes):
    with pytest.raises(ValidationError, match=next(iter(changes))):
        ModelSettings.model_validate(changes)
