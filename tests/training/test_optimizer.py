"""Parameter groups, AdamW and Muon against formulas, muP, and updates that are skipped."""

import re

import numpy as np
import pytest
import torch

from model import SCHEMES, ModelSettings, TokenPositions, Transformer
from model.position.schemes.fox import FoxSettings
from run_directory.training_settings import AdamWBase, AdamWSettings, MuonSettings
from tests.model.zoo import C
from tests.model.zoo import build as zoo_model
from tests.training.net import APPLY, SKIP, Net
from training.optimizer import Optimizer, parameter_groups, positional_matrices

# Five steps in bfloat16, whose numbers are good to 0.4%, against float64: in Frobenius norm, small
# singular values of a square matrix among them.
MUON_TOLERANCE = 0.06
V = 13
T = 7


# Patterns of names, of which exactly one has each parameter.
ROLES = {
    r"embed\.weight": "embeddings",
    r"head\.weight": "head",
    r"(layers\.\d+\.attention\.)?position\..*": "positions",
    r"(layers\.\d+\.)?((attention|mlp)\.)?\w*norm(\.weight)?": "vectors",
    r"layers\.\d+\.(attention|mlp)\.\w+\.bias": "vectors",
    r"layers\.\d+\.attention\.(decay_bias|decay_rate|skip)": "vectors",
    r"layers\.\d+\.scale": "vectors",
    r"layers\.\d+\.attention\.convolution\.weight": "vectors",
    r"layers\.\d+\.(attention\.w\w+|mlp\.(gate|up|down))(\.\d)?\.weight": "matrices",
}
BIASES = {"attention_bias": "all", "mlp_bias": True, "qk_norm": True, "gate": "head"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        *("deltanet-none", "gla-rope", "kda-none", "mamba2-none", "short_convolution-none"),
        *("latent-rope", "hybrid", "path", "fire", "learned", "alibi-nape", "rope"),
    ],
)
def test_groups_of_every_kind_of_parameter(case, tie_embeddings, optimizer):
    """Weight decay for matrices and an untied head alone, Muon for matrices alone."""
    options = BIASES | {"layer_scale": True} if case == "rope" else {}
    model = zoo_model(case, tie_embeddings=tie_embeddings, **options)
    adamw = AdamWBase(weight_decay=0.3, positions_lr=0.01)
    settings = MuonSettings(weight_decay=0.2, adamw=adamw)
    if optimizer == "adamw":
        settings = AdamWSettings(weight_decay=0.3, positions_lr=0.01)
    found = {}
    for part in Optimizer(model, settings).parts:
        for group in part.param_groups:
            values = (type(part).__name__, group["weight_decay"], group["rate"])
            found |= dict.fromkeys(group["names"], values)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert ("head.weight" in found) is not tie_embeddings
    rate = "lr" if optimizer == "adamw" else "adamw_lr"
    expected = {
        "matrices": ("AdamW", 0.3, rate) if optimizer == "adamw" else ("Muon", 0.2, "lr"),
        "head": ("AdamW", 0.3, rate),
        "embeddings": ("AdamW", 0.0, rate),
        "vectors": ("AdamW", 0.0, rate),
        "positions": ("AdamW", 0.0, "positions_lr"),
    }
    for name, values in found.items():
        (role,) = [role for pattern, role in ROLES.items() if re.fullmatch(pattern, name)]
        assert values == expected[role], name


def test_learning_rates_and_decay_by_role():
    """One update with gradients of 3: Adam's first step is lr · sign(g), after the decay lr ·
    decay."""
    settings = AdamWSettings(weight_decay=0.5, positions_lr=0.3)
    assert settings.rates == {"lr": 2e-3, "positions_lr": 0.3}
    net = Net(tie_embeddings=False)
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    optimizer = Optimizer(net, settings)
    optimizer.set_learning_rates({"lr": 0.1, "positions_lr": 0.3})
    for weight in net.parameters():
        weight.grad = torch.full_like(weight, 3.0)
    optimizer.step(APPLY)
    for name, weight in net.named_parameters():
        rate = 0.3 if name == "position.weight" else 0.1
        decay = 0.5 if name in ("mix.weight", "head.weight") else 0.0
        expected = before[name] * (1 - rate * decay) - rate
        torch.testing.assert_close(weight.detach(), expected)


# Muon


def newton_schulz(gradient, iterations=5):
    """X ← aX + bXXᵀX + c(XXᵀ)²X from X = G / ‖G‖ (Jordan 2024), in float64."""
    x = gradient / np.linalg.norm(gradient)
    for _ in range(iterations):
        square = x @ x.T
        x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ square @ x
    return x


def test_gradients_are_unchanged_without_a_maximum_norm():
    """Without a pass over them, which would also spread a number that is not finite."""
    net = Net()
    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    net.mix.weight.grad[0, 0] = torch.inf
    assert Optimizer(net, AdamWSettings()).clip_grad_norm(None) == torch.inf
    assert all(weight.grad.min() == 1 for weight in net.parameters())


def test_muon_updates_match_reference_and_others_are_adamw():
    settings = MuonSettings(lr=0.5, weight_decay=0.2, adamw=AdamWBase(weight_decay=0.3))
    net = Net(dim=14, tie_embeddings=False)
    twin = Net(dim=14, tie_embeddings=False)
    twin.load_state_dict(net.state_dict())
    optimizer = Optimizer(net, settings)
    adamw = Optimizer(twin, AdamWSettings(weight_decay=0.3))
    generator = torch.Generator().manual_seed(1)
    weight = net.mix.weight.detach().double().numpy().copy()
    mean = np.zeros_like(weight)
    moved = 0.0
    for step in range(3):
        rate = 0.5 - 0.1 * step
        optimizer.set_learning_rates({"lr": rate, "adamw_lr": 0.01 * (step + 1)})
        adamw.set_learning_rates({"lr": 0.01 * (step + 1)})
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        gradient = net.mix.weight.grad.double().numpy()
        optimizer.step(APPLY)
        adamw.step(APPLY)
        mean = 0.95 * mean + 0.05 * gradient
        direction = 0.2 * 14**0.5 * newton_schulz(0.05 * gradient + 0.95 * mean)
        weight = weight * (1 - rate * 0.2) - rate * direction
        moved += rate * np.linalg.norm(direction)
        error = np.linalg.norm(net.mix.weight.detach().numpy() - weight)
        assert error < MUON_TOLERANCE * moved
    for (name, a), b in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert a.equal(b) == (name != "mix.weight"), name


@pytest.mark.parametrize("case", ["adamw", "muon", "unfused"])
def test_skipped_steps_change_no_state(case):
    """A run with broken steps, the first among them, is to the bit the run without them."""
    generator = torch.Generator().manual_seed(6)
    shapes = [weight.shape for weight in Net().parameters()]
    grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
    bad = [torch.full_like(grad, float("nan")) for grad in grads[0]]

    def run(plan):
        torch.manual_seed(0)
        net = Net()
        optimizer = Optimizer(net, MuonSettings() if case == "muon" else AdamWSettings())
        for group in optimizer.groups if case == "unfused" else []:
            group["fused"] = False
        for i, step in enumerate(plan):
            for weight, grad in zip(
                net.parameters(), bad if step is None else grads[step], strict=True
            ):
                weight.grad = grad.clone()
            if step is None and i:  # broken by the loss alone: gradients look well
                net.mix.weight.grad = grads[0][2].clone()
            optimizer.step(SKIP if step is None else APPLY)
        tensors = optimizer.saved_tensors() | net.state_dict()
        return {name: tensor.clone() for name, tensor in tensors.items()}

    with_bad = run([None, 0, None, None, 1, 2, None])
    without = run([0, 1, 2])
    assert with_bad.keys() == without.keys()
    assert all(with_bad[name].equal(tensor) for name, tensor in without.items())
    fresh = run([])
    assert not any(tensor.equal(without[name]) for name, tensor in fresh.items())


# muP


def build(dim, mup=None, tie_embeddings=False, **more):
    sizes = {"dim": dim, "layers": 2, "heads": dim // 8, "tie_embeddings": tie_embeddings}
    return Transformer(ModelSettings(mup=mup, **sizes, **more), V, T).initialize(3)


def logits(model):
    tokens = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))
    return model(tokens, TokenPositions.plain(T))


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_base_width_equals_standard_parametrization(tie_embeddings):
    plain = build(16, tie_embeddings=tie_embeddings)
    ours = build(16, {"base_dim": 16, "base_head_dim": 8}, tie_embeddings=tie_embeddings)
    assert all(a.equal(b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    assert logits(plain).equal(logits(ours))
    for settings in (AdamWSettings(), MuonSettings()):
        groups = [parameter_groups(model, settings) for model in (plain, ours)]
        a, b = [[group | {"params": None} for group in each] for each in groups]
        assert a == b


def test_factors_at_three_times_base_width():
    """Rates of matrices over 3, decay times 3; head, embeddings and vectors as they were."""
    model = build(48, {"base_dim": 16})
    optimizer = Optimizer(model, AdamWSettings(lr=0.6, weight_decay=0.1))
    optimizer.set_learning_rates({"lr": 0.6})
    values = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.groups}
    assert values == {
        "matrices": (pytest.approx(0.2), pytest.approx(0.3)),
        "head": (0.6, 0.1),
        "embeddings": (0.6, 0.0),
        "vectors": (0.6, 0.0),
    }
    for adjust, factor in (("original", 1.0), ("match_rms_adamw", 3**-0.5)):
        group = parameter_groups(model, MuonSettings(adjust=adjust))[0]
        assert group["name"] == "matrices"
        assert group["factor"] == pytest.approx(factor)
        assert group["weight_decay"] * group["factor"] == pytest.approx(0.1)


def test_positional_matrices_over_the_width_have_the_rate_of_matrices():
    """Not the biases of the gates of FoX, nor the table that learned positions add."""
    for case in [*SCHEMES, "alibi-nape"]:
        model = zoo_model(case)
        wide = positional_matrices(model)
        for name, weight in model.named_parameters():
            is_wide = "position" in name.split(".") and weight.ndim > 1 and weight.shape[-1] == C
            assert (id(weight) in wide) == (is_wide and case != "learned"), (case, name)
    model = build(48, {"base_dim": 16}, position=FoxSettings())
    groups = {group["name"]: group for group in parameter_groups(model, AdamWSettings())}
    values = {name: (group["factor"], group["weight_decay"]) for name, group in groups.items()}
    assert values["positional matrices"] == (pytest.approx(1 / 3), 0.0)
    assert values["positions"] == (1.0, 0.0)
    assert all(name.endswith("bias") for name in groups["positions"]["names"])
    assert len(groups["positional matrices"]["names"]) == 2


def test_output_multiplier_and_initialization():
    model = build(48, {"base_dim": 16})
    plain = build(48)
    tied = build(48, {"base_dim": 16}, tie_embeddings=True)
    hidden = torch.randn(5, 48)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.head.weight.T / 3)
    matrix = plain.layers[0].mixer.wq.weight.std().item()
    for weight, deviation in (
        (model.head.weight, 0.1 / 4),
        (plain.head.weight, 0.1 / 48**0.5),
        (tied.embed.weight, 0.1 / 4),
        (model.layers[0].mixer.wq.weight, matrix),
    ):
        assert weight.std().item() == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize(
    ("head_dim", "mup", "scale"),
    [
        (8, None, 8**-0.5),
        (8, {"base_dim": 16}, 8**-0.5),  # heads were added
        (32, {"base_dim": 16, "base_head_dim": 8}, 8**0.5 / 32),  # heads have grown: 1/D
    ],
)
def test_attention_scale_is_one_over_head_dim(head_dim, mup, scale):
    """Logits of attention are scaled by the factor passed to attend(), seen by a hook."""
    sizes = {
        "dim": 32,
        "layers": 1,
        "heads": 2,
        "head_dim": head_dim,
        "position": {"name": "none"},
    }
    model = Transformer(ModelSettings(mup=mup, **sizes), V, T).initialize(0)
    scales = []
    hooks = [lambda *args: scales.append(args[2])]
    model(torch.arange(T)[None], TokenPositions.plain(T), hooks=hooks)
    assert scales == [pytest.approx(scale, rel=1e-12)]
