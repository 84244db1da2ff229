"""Clipped RoPE, Giraffe's bases, Hard-ALiBi, relative logits, entmax and shifted keys against
independent formulas."""

import math

import pytest
import torch
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

from model import ModelError, TokenPositions, Transformer
from model.attention.mask import AttentionView, Normalizer
from model.mixers.short_convolution import Canon
from run_directory.training_settings import AdamWSettings, MuonSettings
from tests.model.alone import at, bias_of, context_of, normal, put, scheme_of
from tests.model.test_scaling import every_layout, spectrum
from tests.model.zoo import D, G, H, T, V, build, close, ids, settings_of
from training.optimizer import parameter_groups


def test_clipped_frequencies_taper_to_zero():
    """Values of the released code for 20 of 64 pairs at base 500,000."""
    theta = 500_000.0
    found = spectrum(128, theta=theta, scaling={"name": "clipped", "pairs_clipped": 20}).tolist()
    plain = [theta ** (-k / 64) for k in range(64)]
    assert found[:45] == pytest.approx(plain[:45], rel=1e-14)
    assert found[63] == 0
    for i in (1, 7, 18):
        taper = 0.5 * (1 + math.cos(math.pi * i / 19))
        assert found[44 + i] == pytest.approx(plain[44 + i] * taper, rel=1e-12)


def test_pairs_without_a_whole_turn_are_clipped_by_default():
    """Wavelengths 2π·10000^(k/32) above 512 tokens: pairs 16 to 31."""
    found = spectrum(64, length=512, scaling={"name": "clipped"}).tolist()
    plain = [10_000.0 ** (-k / 32) for k in range(32)]
    tapers = [0.5 * (1 + math.cos(math.pi * i / 15)) for i in range(16)]
    expected = [f * t for f, t in zip(plain, [1.0] * 16 + tapers, strict=True)]
    assert found == pytest.approx(expected, abs=1e-15)


def test_bases_of_giraffe():
    """Numbers that the released code computed in float64 for 64 pairs, with truncate = 2048 and
    with scale_power = 0.5: 14 pairs are slowed down to 2π / (16·2048), 9 do not rotate."""
    found = spectrum(128, length=2048, scaling={"name": "truncated"}).tolist()
    published = {0: 1.0, 39: 0.003651741426438093, 40: 0.003162277862429619}
    published |= {41: 0.0001917476038215682, 54: 0.0001917476038215682, 55: 0.0, 63: 0.0}
    assert {k: found[k] for k in published} == pytest.approx(published, rel=1e-7)
    assert found == spectrum(128, length=99, scaling={"name": "truncated", "length": 2048}).tolist()
    found = spectrum(128, scaling={"name": "power"}).tolist()
    published = {0: 1.0, 1: 0.8591723442077637, 32: 0.007071067579090595, 63: 1.44347741297679e-05}
    assert {k: found[k] for k in published} == pytest.approx(published, rel=1e-7)


def test_hard_alibi_windows():
    for keys, windows in (
        ({}, [1, 2, 3, 9, 9, 9]),
        ({"windows": [2, None, 4, 1, None, 7]}, [2, 9, 4, 1, 9, 7]),
    ):
        bias = bias_of(scheme_of("hard_alibi", **keys), 9)[0]
        for head, window in enumerate(windows):
            for query in range(9):
                seen = (bias[head, query, : query + 1] == 0).nonzero().flatten().tolist()
                assert seen == list(range(max(0, query - window + 1), query + 1))
    with pytest.raises(ModelError, match="one entry per head"):
        scheme_of("hard_alibi", windows=[3, None])


@torch.no_grad()
def test_relative_logits_match_inkling():
    """The logits added to each pair in the first layer."""
    model = build({"name": "relative_logits", "profiles": 3, "extent": 7}, layers=1)
    scheme = model.position["all-0"]
    x, view = first_attention(model, ids(2, T))
    theirs = InklingRelativeLogits(3, 7).double()
    theirs.proj.copy_(scheme.profiles)
    mixed = (x @ scheme.mix.T).unflatten(2, (H, 3))
    expected = theirs(mixed, torch.arange(T), torch.arange(T))  # (B, H, T, T)

    added = view.mask.bias(*view.mask.indices(0, T, slice(0, T)))
    close(added.tril(), expected.tril(), atol=1e-12)


def entmax(logits: torch.Tensor) -> torch.Tensor:
    return Normalizer(is_sparse=True)(logits)


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("count", [1, 2, 7, 3000])
def test_entmax_maximizes_its_objective(count, scale):
    """pᵀz + Σ (p − p^1.5)·4/3 over distributions p: its slope in p_i is the same where p_i > 0, and
    at most that elsewhere. Some logits are masked, some equal."""
    z = scale * normal(4, count, seed=count)
    z[:, count // 2] = z[:, 0]
    if count > 2:
        z[:, 1] = -torch.inf
    p = entmax(z)
    close(p.sum(-1), torch.ones(4).double(), atol=1e-9)
    slopes = z - 2 * p.sqrt()
    for row, weights in zip(slopes, p, strict=True):
        level = row[weights > 0]
        assert level.max() - level.min() < 1e-8
        assert row.max() < level.max() + 1e-8
    assert count < 7 or scale < 1 or (p == 0).any()


def test_gradient_of_entmax():
    z = 1.5 * normal(3, 9)
    z[0, 4] = -torch.inf
    finite = z.isfinite()
    assert torch.autograd.gradcheck(
        lambda x: entmax(torch.where(finite, x, -torch.inf)),
        torch.where(finite, z, 0.0).requires_grad_(),
    )


def first_attention(model, tokens: torch.Tensor) -> tuple[torch.Tensor, AttentionView]:
    """The input and the view of the attention of the first layer."""
    views = []
    model(tokens, hooks=[lambda found, *_: views.extend(found)])
    return model.layers[0].attention_norm(model.embed(tokens)), views[0]


@torch.no_grad()
def test_shifted_keys_are_those_of_the_released_code():
    """k[:, 1:, :, D // 2 :] = k[:, : −1, :, D // 2 :], with half of the features rotated."""
    position = {"name": "rope", "fraction": 0.6, "shifted_keys": 0.4}
    model = build(position, layers=1)
    x, view = first_attention(model, ids(2, T))
    weight = model.layers[0].mixer.wk.weight
    k = (x @ weight.T).unflatten(-1, (G, D))  # (B, T, G, D)
    theta = 10_000.0 ** (-torch.arange(3).double() / 3)
    angles = torch.arange(T)[:, None] * theta
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.complex(k[..., :3], k[..., 3:6]) * turns
    k = torch.cat([turned.real, turned.imag, k[..., 6:]], dim=-1)
    k[:, 1:, :, 6:] = k[:, :-1, :, 6:].clone()
    close(view.k.transpose(1, 2), k, atol=1e-12)


@torch.no_grad()
def test_adaptive_temperature_is_that_of_asentmax():
    temperature = {"name": "adaptive", "delta": 0.5, "gamma_range": 1.5, "first_head": 2}
    model = build({"name": "none", "temperature": temperature}, layers=1)
    x, view = first_attention(model, ids(2, T))
    attention = model.layers[0].mixer
    w, u = attention.position.adaptive
    logs = torch.arange(2, T + 2).double().log()[:, None]
    factors = torch.ones(2, T, H, dtype=torch.float64)
    softplus = (1 + (x @ w.T).exp()).log()
    exponent = 1.5 * (x @ u.T).tanh()
    factors[..., 2:] = 0.5 + softplus * logs**exponent
    q = (x @ attention.wq.weight.T).unflatten(-1, (H, D))
    close(view.q.transpose(1, 2), q * factors[..., None], atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("exclusive", ["full", "learned"])
def test_exclusive_attention_drops_components_along_own_values(exclusive):
    """y = (1, 2, 3) and v = (2, 0, 1) with y·v = |v|² = 5: y − v, or y − tanh(α)·v as in the record
    of modded-nanogpt; then all heads of a layer, one by one."""
    mixer = {"name": "attention", "exclusive": exclusive}
    model = build({"name": "rope"}, layers=1, mixer=mixer)
    attention = model.layers[0].mixer
    share = torch.ones(H, dtype=torch.float64)
    if exclusive == "learned":
        alphas = torch.linspace(-1, 0.5, H, dtype=torch.float64)
        attention.exclusion.copy_(alphas)
        share = alphas.tanh()
    y = torch.tensor([1.0, 2, 3], dtype=torch.float64).expand(1, H, 1, 3)
    v = torch.tensor([2.0, 0, 1], dtype=torch.float64).expand(1, G, 1, 3)
    found = attention.excluding(y, v)
    close(found[0, :, 0], y[0, :, 0] - share[:, None] * v[0, 0, 0], atol=1e-12)
    assert exclusive == "full" or float(share[-1]) == pytest.approx(0.4621171572600098)

    outputs = []
    inputs = []
    attention.wo.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    tokens = ids(2, T)
    model(tokens, hooks=[lambda views, v, scale, normalizer, out: outputs.append((v, out))])
    (values, plain), (mixed,) = outputs[0], inputs
    for b, h, t in ((0, 0, 0), (1, 3, 7), (1, H - 1, T - 1)):
        own, y = values[b, h // (H // G), t], plain[b, h, t]
        part = sum(a * c for a, c in zip(own, y, strict=True)) / sum(a * a for a in own)
        close(mixed[b, t, h * D : (h + 1) * D], y - share[h] * part * own, atol=1e-12)


@torch.no_grad()
def test_canon_layer_matches_the_released_code():
    """Outputs that apply_canon of the released code computed for these weights."""
    layer = Canon("A", 2, 4).double()
    layer.convolution.weight.copy_(torch.tensor([[0.1, -0.2, 0.3, 0.4], [1, 0, -1, 0.5]]).double())
    x = torch.tensor([[1.0, 2], [-1, 0.5], [0, 3], [2, -2], [0.5, 1]]).double()[None]
    expected = [[1.4, 3.0], [-1.1, -1.25], [-0.5, 4.0], [3.1, -4.0], [1.2, 4.0]]
    context = context_of(scheme_of("none"), TokenPositions.plain(5), rows=1)
    close(layer(x, context, None)[0], torch.tensor(expected).double(), atol=1e-6)


def test_canon_layers_are_filters_without_weight_decay():
    """AdamW's and Muon's group of vectors; the initial weights are those of torch's Conv1d."""
    model = Transformer(settings_of({"name": "none"}, canon=("A", "B", "C", "D")), V, T)
    names = {name for name, _ in model.named_parameters() if "canon" in name}
    assert len(names) == 4 * len(model.layers)
    for optimizer in (AdamWSettings(), MuonSettings()):
        groups = {group["name"]: group for group in parameter_groups(model, optimizer)}
        assert names <= set(groups["vectors"]["names"])
        assert groups["vectors"]["weight_decay"] == 0
    model.initialize(0)
    drawn = torch.cat([model.get_parameter(name).detach().flatten() for name in names])
    assert drawn.abs().max() < 0.5
    assert float(drawn.std()) == pytest.approx(0.5 / math.sqrt(3), rel=0.1)


def test_exclusive_attention_starts_as_attention():
    mixer = {"name": "attention", "exclusive": "learned"}
    settings = settings_of({"name": "rope"}, mixer=mixer)
    model = Transformer(settings, V, T).initialize(0)
    plain = Transformer(settings_of({"name": "rope"}), V, T).initialize(0)
    assert torch.equal(model(ids(1, T)), plain(ids(1, T)))


@every_layout
@torch.no_grad()
def test_imaginary_heads_of_rope_pp(layout):
    """Heads 2h and 2h + 1 are real and imaginary parts of the same products of complex numbers."""
    model = build({"name": "rope", "theta": 50.0, "layout": layout, "imaginary": True}, layers=1)
    x, view = first_attention(model, ids(2, T))
    attention = model.layers[0].mixer
    assert attention.wq.out_features == H // 2 * D

    def complexes(weight: torch.Tensor, heads: int) -> torch.Tensor:
        parts = (x @ weight.T).unflatten(-1, (heads, D))
        pairs = parts.chunk(2, -1) if layout == "half" else (parts[..., 0::2], parts[..., 1::2])
        return torch.complex(*pairs).transpose(1, 2)  # (B, heads, T, D / 2)

    q = complexes(attention.wq.weight, H // 2)
    k = complexes(attention.wk.weight, G)  # one for each query here
    positions = torch.arange(T).double()
    distance = positions[:, None, None] - positions[:, None]
    angle = distance * 50.0 ** -(torch.arange(D // 2).double() / (D // 2))
    turn = torch.polar(torch.ones_like(angle), angle)
    products = torch.einsum("bhnc,bhmc,nmc->bhnm", q, k.conj(), turn)
    found = view.q @ view.k.repeat_interleave(2, dim=1).mT
    close(found[:, 0::2], products.real, atol=1e-10)
    close(found[:, 1::2], products.imag, atol=1e-10)


def test_rope_pp_matches_the_released_code():
    """q·k of positions 7 and 4 that apply_rotary_pos_emb of the released code computed."""
    scheme = scheme_of("rope", heads=2, groups=1, features=4, imaginary=True)
    positions = at([4, 5, 6, 7], 16)
    q = torch.tensor([1.0, 2, -3, 0.5]).double().expand(1, 2, 4, 4)
    k = torch.tensor([0.25, -1, 2, 1.5]).double().expand(1, 1, 4, 4)
    plan = scheme.plan(context_of(scheme, positions, rows=1))
    (view,) = plan.read(q, plan.write(k))
    scores = (view.q[0, :, 3] * view.k[0, 0, 0]).sum(-1)
    assert scores.tolist() == pytest.approx([4.936083586139696, -1.6248801740675871], abs=1e-12)


def test_clex_starts_as_ntk():
    """W₂ = 0: frequencies of a base multiplied by (2t − 1)^(D / (D − 2)), in closed form."""
    scheme = scheme_of("clex", features=8, max_factor=5)
    found = scheme.frequencies(torch.device("cpu"), 5)
    for t in range(1, 6):
        base = 10_000.0 * (2 * t - 1) ** (8 / 6)
        expected = torch.tensor([base ** (-k / 4) for k in range(4)]).double()
        torch.testing.assert_close(found[t - 1], expected, rtol=3e-5, atol=0)


@torch.no_grad()
def test_clex_matches_the_released_code():
    """θ(3) that ODELinear of the released code gave for these weights, integrated with the
    classical Runge-Kutta method of step 0.01."""
    scheme = scheme_of("clex", features=8, max_factor=3, step=0.01)
    scheme.up.copy_(((torch.arange(32).double() * 5 % 9 - 4) / 10).view(4, 8))
    scheme.down.copy_(((torch.arange(32).double() * 7 % 11 - 5) / 20).view(8, 4))
    found = scheme.frequencies(torch.device("cpu"), 3)[2].tolist()
    published = [
        2.184090486912028,
        0.047446182470004414,
        0.0018307659027905893,
        0.00013208323263849,
    ]
    assert found == pytest.approx(published, rel=1e-12)


@pytest.mark.parametrize(("length", "factor"), [(3, 1), (16, 1), (17, 2), (48, 3), (400, 5)])
def test_clex_rotates_by_the_frequencies_of_the_declared_length(length, factor):
    scheme = put(scheme_of("clex", max_factor=5), down=0.3 * normal(D, D // 2))
    theta = scheme.eval().frequencies(torch.device("cpu"), 5)[factor - 1].detach()
    positions = at([2, 9], length)
    q, k = normal(1, H, 2, D), normal(1, G, 2, D)
    plan = scheme.plan(context_of(scheme, positions, rows=1))
    (view,) = plan.read(q, plan.write(k))
    a, b = (
        torch.complex(*x.chunk(2, -1)) for x in (q[0, :, 1], k[0].repeat_interleave(2, 0)[:, 0])
    )
    expected = (a * b.conj() * torch.polar(torch.ones_like(theta), 7 * theta)).sum(-1).real
    found = (view.q[0, :, 1] * view.k[0].repeat_interleave(2, 0)[:, 0]).sum(-1)
    close(found.detach(), expected, atol=1e-12)


def test_clex_trains_the_factor_of_the_largest_position():
    """In a training pass positions 0, 20 and 47 of L0 = 16 are those of t = 3, whatever length is
    declared."""
    scheme = put(scheme_of("clex", max_factor=5), down=0.3 * normal(D, D // 2))
    scheme.train()
    q, k = normal(1, H, 3, D), normal(1, G, 3, D)
    plan = scheme.plan(context_of(scheme, at([0, 20, 47], 16), rows=1))
    (trained,) = plan.read(q, plan.write(k))
    scheme.eval()
    plan = scheme.plan(context_of(scheme, at([0, 20, 47], 48), rows=1))
    (expected,) = plan.read(q, plan.write(k))
    scores = [view.q @ view.k.repeat_interleave(2, 1).mT for view in (trained, expected)]
    close(*scores, atol=1e-10)
    gradients = torch.autograd.grad(scores[0].square().sum(), [scheme.up, scheme.down])
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
