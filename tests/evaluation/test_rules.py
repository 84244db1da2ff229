"""Every built-in rule, laid over a run with rotary positions: it is legal, and it does something."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from evaluation import read_rules, resolve_rules
from evaluation.analysis import describe_scheme
from model import Places, Transformer, check_override
from training.config import apply_words
from training.settings import RunSettings

BUILTIN = read_rules(Path(__file__).parents[2] / "configs" / "evaluation" / "rules.yaml")
L0, V = 32, 23
SAME = {"trained", "truncate"}  # no overrides of the model


@pytest.mark.parametrize("label", BUILTIN)
@torch.no_grad()
def test_a_builtin_rule_is_legal_and_changes_what_lies_past_the_trained_length(label):
    shape = ["model.dim=24", "model.heads=2", "model.layers=2", "model.position.theta=100.0"]
    root = apply_words(RunSettings(), shape)
    rule = resolve_rules([label], BUILTIN, L0)[-1]
    asked = apply_words(root, list(rule.words))
    check_override(root.model, asked.model)
    trained = Transformer(root.model, V, L0).initialise(0).double().eval()
    ruled = Transformer(asked.model, V, L0).double().eval()
    ruled.load_state_dict(trained.state_dict())
    text = torch.arange(4 * L0)[None] % V
    apart = (ruled(text, Places.plain(4 * L0)) - trained(text, Places.plain(4 * L0))).abs()[0].amax(-1)
    assert (apart.max() > 1e-6) == (label not in SAME)
    if {"remap", "window"} & {word.split("=")[0].split(".")[-1] for word in rule.words}:
        assert apart[: L0 // 2].max() < 1e-10  # they leave short distances as they were trained


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("rerope", "rope, rerope"),
        ("leaky_rerope", "rope, leaky_rerope factor 16.0"),
        ("self_extend", "rope, self_extend group 8"),
        ("dual_chunk", "rope, dual_chunk"),
        ("lambda", "rope, lambda, window 22, 10 sinks"),
        ("streaming", "rope, streaming, window 28, 4 sinks"),
        ("window", "rope, window 32"),
    ],
)
def test_results_name_the_remap_and_what_is_kept(label, words):
    asked = apply_words(RunSettings(), list(resolve_rules([label], BUILTIN, L0)[-1].words))
    schemes = {label: asked.model.position.model_dump(mode="json")}
    lengths = SimpleNamespace(trained_length=L0, original_length=L0)
    assert describe_scheme(SimpleNamespace(schemes=schemes, subject=lengths), label, 128) == words
