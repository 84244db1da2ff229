"""muP: which parameters are scaled with width, and by which factors."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from model import ModelSettings, TokenPositions, Transformer
from run_directory.optimizer_settings import AdamWBase, AdamWSettings, MuonSettings
from training.optim.optimizer import make_optimizer, set_learning_rates

V = 13
T = 7


def build(dim, mup=None, tie_embeddings=False, **more):
    settings = ModelSettings(
        dim=dim, layers=2, heads=dim // 8, tie_embeddings=tie_embeddings, mup=mup, **more
    )
    return Transformer(settings, V, T).initialize(3)


def logits(model, seed=0):
    tokens = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(seed))
    return model(tokens, TokenPositions.plain(T))


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_base_width_equals_standard_parametrization(tie_embeddings):
    plain = build(16, tie_embeddings=tie_embeddings)
    ours = build(16, {"base_dim": 16, "base_head_dim": 8}, tie_embeddings=tie_embeddings)
    assert all(a.equal(b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    assert logits(plain).equal(logits(ours))
    for settings in (AdamWSettings(), MuonSettings()):
        groups = [make_optimizer(model, settings).param_groups for model in (plain, ours)]
        parameters = [
            [{k: v for k, v in group.items() if k != "params"} for group in one] for one in groups
        ]
        assert parameters[0] == parameters[1]


def test_factors_at_three_times_base_width():
    """Rates of matrices over 3, decay times 3; head, embeddings and vectors as they were."""
    model = build(48, {"base_dim": 16})
    optimizer = make_optimizer(model, AdamWSettings(lr=0.6, weight_decay=0.1))
    set_learning_rates(optimizer, {"lr": 0.6})
    found = {
        group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups
    }
    assert found == {
        "matrices": (pytest.approx(0.2), pytest.approx(0.3)),
        "head": (0.6, 0.1),
        "embeddings": (0.6, 0.0),
        "vectors": (0.6, 0.0),
    }
    for adjust, factor in (("original", 1.0), ("match_rms_adamw", 3**-0.5)):
        group = make_optimizer(model, MuonSettings(adjust=adjust)).param_groups[0]
        assert group["name"] == "matrices" and group["factor"] == pytest.approx(factor)
        assert group["weight_decay"] * group["factor"] == pytest.approx(0.1)


def test_output_multiplier_and_initialization():
    model = build(48, {"base_dim": 16})
    hidden = torch.randn(5, 48)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.head.weight.T / 3)
    assert model.head.weight.std().item() == pytest.approx(0.1 / 4, rel=0.1)
    assert build(48).head.weight.std().item() == pytest.approx(0.1 / 48**0.5, rel=0.1)
    tied = build(48, {"base_dim": 16}, tie_embeddings=True)
    assert tied.embed.weight.std().item() == pytest.approx(0.1 / 4, rel=0.1)
    matrices = [one.layers[0].attention.wq.weight for one in (model, build(48))]
    assert matrices[0].std().item() == pytest.approx(matrices[1].std().item(), rel=0.1)


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
    settings = ModelSettings(
        dim=32, layers=1, heads=2, head_dim=head_dim, mup=mup, position={"name": "none"}
    )
    model = Transformer(settings, V, T).initialize(0)
    seen = []
    model(
        torch.arange(T)[None], TokenPositions.plain(T), hooks=[lambda *args: seen.append(args[2])]
    )
    assert seen == [pytest.approx(scale, rel=1e-12)]


def test_invalid_settings():
    mup = {"base_dim": 16, "base_head_dim": 8}
    with pytest.raises(ValidationError, match=r"base_head_dim: .*linear"):
        ModelSettings(dim=32, heads=4, mixer={"name": "linear"}, mup=mup)
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        ModelSettings(mup={"base_dim": 0})


@pytest.mark.parametrize("grow", ["heads", "features"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_updates_grow_with_width_without_mup_only(optimizer, grow):
    """The coordinate check of arXiv:2203.03466, appendix D.1: RMS change of the logits over width
    after three steps."""
    widths = [32, 64, 128]
    rates = {"lr": 0.01, "weight_decay": 0.0}
    settings = AdamWSettings(**rates)
    if optimizer == "muon":
        settings = MuonSettings(**rates, adamw=AdamWBase(**rates))
    for base in (None, 32):
        changes = []
        for width in widths:
            heads = width // 16 if grow == "heads" else 2
            mup = base and {"base_dim": base, "base_head_dim": 16}
            shape = ModelSettings(dim=width, layers=2, heads=heads, ffn_dim=2 * width, mup=mup)
            model = Transformer(shape, V, T).initialize(0)
            before = logits(model).detach()
            update = make_optimizer(model, settings)
            set_learning_rates(update, settings.rates)
            targets = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(1))
            for _ in range(3):
                logits_now = logits(model)
                torch.nn.functional.cross_entropy(
                    logits_now.flatten(0, 1), targets.flatten()
                ).backward()
                update.step()
                update.zero_grad()
            changes.append(float((logits(model).detach() - before).square().mean().sqrt()))
        growth = np.polyfit(np.log(widths), np.log(changes), 1)[0]
        assert abs(growth) < 0.3 if base else growth > 0.35, (base, changes)
