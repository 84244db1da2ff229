"""Kinds of layers: settings, stored runs of earlier versions, decoding and training of models whose
layers differ, and output gates."""

from __future__ import annotations

import copy

import pytest
import torch
from pydantic import ValidationError

from model import ModelError, ModelSettings, TokenPositions, Transformer
from model.model_settings import without_pattern_scheme
from run_directory.run_settings import RunSettings
from settings.load import dump, load_settings, load_stored
from tests.model.zoo import C, G, H, T, V, build, close, ids, refusal

ROPE = {"position": {"name": "rope", "window": 4}}
NOPE = {"position": {"name": "none"}}
LINEAR = {"mixer": {"name": "linear"}}
HYBRIDS = ["hybrid", "hybrid-heads", "hybrid-window"]


def settings_of(**keys) -> ModelSettings:
    return ModelSettings(**{"dim": 24, "layers": 3, "heads": 4, "kv_heads": 2, **keys})


def test_a_kind_has_what_it_gives_and_the_rest_of_the_model():
    own = {"position": {"window": 4}, "gate": "head", "heads": 6, "kv_heads": 3}
    s = settings_of(
        position={"name": "rope", "theta": 500.0},
        pattern=["a", "a", "b"],
        kinds={"a": own, "b": {**LINEAR, **NOPE}},
    )
    a, b = s.resolved_kinds.values()
    assert s.layer_kinds == ["a", "a", "b"]
    assert (a.position.theta, a.position.window, a.gate) == (500.0, 4, "head")
    assert (a.mixer.name, a.heads, a.kv_heads, a.head_dim) == ("attention", 6, 3, 6)
    assert (b.mixer.name, b.position.name, b.gate) == ("linear", "none", "none")
    assert (b.heads, b.kv_heads, b.head_dim) == (4, 2, 6)
    assert ModelSettings(**s.model_dump(mode="json")).resolved_kinds == s.resolved_kinds


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"pattern": ["a", "c"], "kinds": {"a": ROPE}}, "'c'"),
        ({"pattern": ["a"]}, "'a'"),
        ({"pattern": ["a"], "kinds": {"a": ROPE, "b": NOPE}}, "'b'"),
        ({"kinds": {"a": ROPE}}, "model.pattern"),
        ({"pattern": ["a", "b"], "kinds": {"a": ROPE, "b": NOPE}, "layers": 1}, "model.layers"),
        ({"pattern": ["a"], "kinds": {"a": {"heads": 3}}}, "kv_heads 2"),
        ({"pattern": ["a"], "kinds": {"a": {"gate": "tanh"}}}, "gate"),
        ({"pattern": ["a"], "kinds": {"a": {"mixer": {"name": "x"}}}}, "mixer"),
        ({"pattern": ["a"], "kinds": {"a": NOPE}, "position": {"name": "alibi"}}, "position"),
        ({"pattern": ["a"], "kinds": {"a": LINEAR}, "attention_multiplier": 0.2}, "multiplier"),
        ({"position": {"name": "pattern", "layers": ["a"], "kinds": {"a": {}}}}, "model.pattern"),
        ({"position": {"kinds": {"a": {"window": 4}}}}, "model.kinds.KIND.position"),
    ],
    ids=str,
)
def test_bad_kinds(keys, word):
    assert word in refusal(lambda: settings_of(**keys), ValidationError)


@pytest.mark.parametrize("position", [{"name": "alibi"}, {"name": "rope", "window": 4}], ids=str)
def test_a_mixer_refuses_schemes_of_its_layers_only(position):
    """On the meta device, before any compute."""
    kinds = {"state": {**LINEAR, "position": position}, "full": {"position": position}}
    s = settings_of(pattern=["full", "state"], kinds=kinds)
    with torch.device("meta"):
        text = refusal(lambda: Transformer(s, V, 8), ModelError)
    assert "model.kinds.state.position" in text


def test_stored_runs_of_earlier_versions_open(tmp_path):
    """Equal settings, with the overrides of their stages."""
    kinds = {"near": {"name": "rope", "window": 8}, "far": {"name": "none"}}
    model = {
        "layers": 2,
        "position": {"name": "pattern", "layers": ["near", "far"], "kinds": kinds},
    }
    new = without_pattern_scheme(model)
    assert {name: kind["position"] for name, kind in new["kinds"].items()} == kinds
    stage = "{overrides: [model.position.kinds.near.window=4]}"
    overrides = [f"model.pattern={new['pattern']}", f"model.kinds={new['kinds']}", "model.layers=2"]
    run = load_settings(RunSettings, [*overrides, f"training.stages=[{{duration: 9}}, {stage}]"])
    record = run.model.positions_record()
    assert record["name"] == "pattern" and record["kinds"]["near"]["window"] == 8
    stored = tmp_path / "settings.yaml"
    stored.write_text(dump(run))
    again = load_stored(RunSettings, stored)
    assert again.model == run.model
    assert again.training.stages[1].overrides == ["model.kinds.near.position.window=4"]
    assert without_pattern_scheme({"position": record})["kinds"].keys() == {"near", "far"}


@torch.no_grad()
def test_states_do_not_grow_and_rows_are_selected():
    model = build("hybrid-heads")
    tokens = ids(2, T)
    cache = model.make_cache(2, T)
    model(tokens[:, :5], TokenPositions.plain(5), cache=cache)
    sizes = [state.last.memory.shape for state in cache.layers[::2]]
    rows = torch.tensor([1, 0, 1])
    cache.select_rows(rows)
    cache.grow(4 * T)
    rest = TokenPositions.plain(T - 5, offset=5, length=T)
    out = model(tokens[rows, 5:], rest, cache=cache)
    close(out, model(tokens[rows])[:, 5:])
    assert [state.last.memory.shape[1:] for state in cache.layers[::2]] == [s[1:] for s in sizes]


@pytest.mark.parametrize("case", [*HYBRIDS, "gate-head"])
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_checkpointing_and_parameters_of_mixed_layers(case, checkpointing):
    expected = build(case).train()
    model = copy.deepcopy(expected)
    model.checkpoint_blocks(checkpointing)
    tokens = ids(2, T + 1)
    for each in (expected, model):
        each(tokens[:, :-1], None, tokens[:, 1:], reduction="sum").backward()
    for (name, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert a.grad is not None and a.grad.abs().max() > 0, name
        close(b.grad, a.grad)


@torch.no_grad()
def test_gate_per_channel_is_that_of_qwen3_next():
    """Whose projection of queries has the gate of each head after its query."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = qwen.Qwen3NextConfig(
        hidden_size=C,
        num_attention_heads=H,
        num_key_value_heads=G,
        head_dim=10,
        attention_bias=False,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    theirs = qwen.Qwen3NextAttention(config, 0).double().eval()
    model = build({"name": "none"}, layers=1, gate="channel", qk_norm=True)
    ours = model.blocks[0].attention
    both = theirs.q_proj.weight.view(H, 20, C)
    ours.wq.weight.copy_(both[:, :10].flatten(0, 1))
    ours.wg.weight.copy_(both[:, 10:].flatten(0, 1))
    for w, other in ((ours.wk, theirs.k_proj), (ours.wv, theirs.v_proj), (ours.wo, theirs.o_proj)):
        w.weight.copy_(other.weight)
    for norm, other in ((ours.q_norm, theirs.q_norm), (ours.k_norm, theirs.k_norm)):
        norm.weight.copy_(1 + other.weight)
    x = torch.randn(2, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    chunk = model.prepare(TokenPositions.plain(T))
    step = model.passes(2, chunk, {"all": chunk.positions})["all"]
    unrotated = (torch.ones(1, T, 10).double(), torch.zeros(1, T, 10).double())
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    close(ours(x, step, None), theirs(x, unrotated, mask)[0], atol=1e-6)  # its softmax is float32
