"""Numbers of papers and of released code: default settings, initial values, and recurrent layers
that transformers does not have."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from model import SCHEMES, TokenPositions
from model.mixers import MIXERS
from model.mixers.mixer import AttentionPass
from tests.files import table
from tests.model.alone import context_of, doubles, normal, scheme_of
from tests.model.zoo import CONFIGS, C, D, G, H, build, close, settings_of

PUBLISHED = table("model/published.yaml")


def scheme_part(key: str, name: str) -> Any:
    return getattr(settings_of({"name": "rope", key: {"name": name}}).position, key)


def mixer_of_file(name: str) -> Any:
    mixer = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]["mixer"]
    return MIXERS["recurrent"][0].model_validate(mixer)


DEFAULTS = {
    "scaling": lambda name: scheme_part("scaling", name),
    "remap": lambda name: scheme_part("remap", name),
    "temperature": lambda name: scheme_part("temperature", name),
    "scheme": lambda name: SCHEMES[name][0](),
    "mixer": lambda name: MIXERS[name][0](),
    "config": mixer_of_file,
}


@pytest.mark.parametrize("part", DEFAULTS)
def test_default_settings(part):
    for name, expected in PUBLISHED[part].items():
        settings = DEFAULTS[part](name)
        assert {key: getattr(settings, key) for key in expected} == expected, name


@pytest.mark.parametrize(("name", "keys", "expected"), PUBLISHED["initial"], ids=str)
def test_initial_values(name, keys, expected):
    """Within 10%, of 500 numbers or more."""
    scheme = scheme_of(name, heads=512, groups=512, features=8, dim=64, **keys)
    parameters = dict(scheme.named_parameters())
    assert parameters.keys() == expected.keys()
    for parameter, distribution in expected.items():
        values = parameters[parameter].detach()
        if not isinstance(distribution, list):
            close(values, torch.full_like(values, distribution), atol=1e-5)
            continue
        kind, *numbers = distribution
        if kind == "normal":
            assert values.mean().abs() < 0.1 * numbers[0]
            assert values.std().item() == pytest.approx(numbers[0], rel=0.1)
        else:
            low, high = numbers
            margin = 0.05 * (high - low)
            assert low <= values.min() < low + margin
            assert high - margin < values.max() <= high


def test_initial_values_of_other_forms():
    slopes = 2.0 ** (-8 * torch.arange(1, 9).double() / 8)  # of ALiBi, for 8 heads
    keys = {"heads": 8, "groups": 8}
    close(scheme_of("alibi", learned=True, **keys).slopes.detach(), slopes, atol=1e-12)
    gates = scheme_of("fox", gate="constant", **keys).bias.detach().sigmoid()
    close(gates, (-slopes).exp(), atol=1e-12)
    fixed = scheme_of("fox", gate="fixed", **keys)
    tables = fixed.tables(TokenPositions.plain(1), torch.float64)
    close(fixed.features(torch.zeros(1, 1, C), tables)[0, 0], -slopes, atol=1e-12)
    # θ_k = 5^(−k/4) ≥ 2π/16 for three of four pairs: noise of standard deviation 0.3/√3
    mix = scheme_of("fope", groups=512, heads=512, features=8, theta=5.0).cos_mix.detach()
    noise = mix - torch.eye(3)
    assert noise.std().item() == pytest.approx(0.3 / 3**0.5, rel=0.05)
    assert noise.mean().abs() < 0.01
    ssmax = build({"name": "none", "temperature": {"name": "ssmax"}}, layers=1)
    assert (ssmax.initialize(0).layers[0].mixer.position.scale == 0.43).all()


@pytest.mark.parametrize("case", ["mamba2-none", "gated_deltanet-none", "kda-none"])
def test_initial_decays_are_those_of_mamba2(case):
    """exp(A) from 1 to 16, and softplus(bias) from 0.001 to 0.1."""
    layer = build(case, layers=1).initialize(0).layers[0].mixer
    close(layer.decay_rate.detach().exp(), torch.linspace(1, 16, H).double(), atol=1e-5)
    steps = F.softplus(layer.decay_bias.detach())
    ends = doubles([1e-3, 0.1])
    torch.testing.assert_close(steps[[0, -1]], ends, rtol=1e-4, atol=0)
    ratios = steps[1:] / steps[:-1]
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=1e-4, atol=0)
    convolution = getattr(layer, "convolution", None)
    if convolution is not None and convolution.bias is not None:
        assert not convolution.bias.any()
    gla = build("gla-none", layers=1).initialize(0).layers[0].mixer
    assert not gla.decay_bias.any()


@pytest.mark.parametrize("name", ["retnet", "gla", "deltanet"])
@torch.no_grad()
def test_layers_equal_their_papers(name):
    """Token by token: the decay, β, the state, then the norm of each head, then the gate."""
    model = build(f"{name}-none", layers=1)
    layer = model.layers[0].mixer
    scheme = model.position["all"]
    tokens = 9
    x = normal(2, tokens, C, seed=7)
    context = context_of(scheme, TokenPositions.plain(tokens))
    found = layer(x, AttentionPass(context, scheme.plan(context), None), None)

    q, k, v = (x @ weight.weight.T for weight in (layer.wq, layer.wk, layer.wv))
    decay = torch.ones(2, tokens, H, 1).double()
    beta = torch.ones(2, tokens, H).double()
    if name == "retnet":
        decay = decay * doubles([1 - 2.0 ** (-5 - h) for h in range(H)])[:, None]
    if name == "gla":
        first, second = (part.weight for part in layer.w_decay)
        gates = (x @ first.T @ second.T + layer.decay_bias).sigmoid()
        decay = (gates ** (1 / 16)).unflatten(-1, (H, D))
    if name == "deltanet":
        series = F.pad(torch.cat([q, k, v], dim=-1).mT, (3, 0))
        taps = layer.convolution.weight[:, None]
        mixed = F.silu(F.conv1d(series, taps, groups=len(taps))).mT
        q, k, v = mixed.split([G * D, G * D, mixed.shape[-1] - 2 * G * D], dim=-1)
        beta = (x @ layer.w_beta.weight.T).sigmoid()
    q, k = (each.unflatten(-1, (G, D)).repeat_interleave(H // G, dim=2) for each in (q, k))
    if name == "deltanet":
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    v = v.unflatten(-1, (H, -1))
    state = torch.zeros(2, H, D, v.shape[-1]).double()
    outputs = []
    for t in range(tokens):
        state = state * decay[:, t, :, :, None]
        old = torch.einsum("bhk,bhkv->bhv", k[:, t], state) if name == "deltanet" else 0
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], v[:, t] - old)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / math.sqrt(D))
    out = torch.stack(outputs, dim=1)
    out = out / (out.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt() * layer.output_norm
    out = out.flatten(2)
    if name != "deltanet":
        gates = x
        parts = layer.w_gate if isinstance(layer.w_gate, torch.nn.Sequential) else [layer.w_gate]
        for part in parts:
            gates = gates @ part.weight.T
        out = out * F.silu(gates)
    close(found, out @ layer.wo.weight.T, atol=1e-10)
