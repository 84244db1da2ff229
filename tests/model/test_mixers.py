"""Recurrent layers, short convolutions and latent attention against transformers' modules; planted
faults; state of constant size; invalid settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo

from model import ModelSettings, TokenPositions, Transformer
from model.mixers import layer_state
from model.mixers.convolution import CausalConvolution
from model.mixers.recurrence import Inputs
from tests.interop.models import double_precision
from tests.model import test_conformance, test_recurrence
from tests.model.recurrences import difference
from tests.model.zoo import CONFIGS, RECURRENT, C, V, build, ids

TOKENS = 41
GATED_DELTANET = {
    "name": "recurrent",
    "decay": "head",
    "delta": True,
    "beta": "sigmoid",
    "unit_qk": True,
    "value_dim": 14,
    "convolution": 4,
    "output_gate": "silu",
    "output_norm_eps": 1e-5,
}
KDA = {
    "name": "recurrent",
    "decay": "channel",
    "decay_rank": 10,
    "delta": True,
    "beta": "sigmoid",
    "unit_qk": True,
    "convolution": 4,
    "output_gate": "sigmoid",
    "gate_rank": 10,
}
MAMBA2 = {
    "name": "recurrent",
    "decay": "head",
    "beta": "step",
    "scale": 1.0,
    "value_dim": 14,
    "convolution": 4,
    "convolution_bias": True,
    "skip": True,
    "output_norm": "group",
    "output_gate": "silu",
    "gate_first": True,
}


def mixer(settings: dict, position: dict | str = "none", **keys) -> tuple[nn.Module, Callable]:
    """The mixer of a model of one layer, and a function that applies it to inputs (B, T, C)."""
    model = build(position, mixer=settings, layers=1, norm_eps=1e-6, **keys)
    module = model.layers[0].attention

    def run(x: Tensor) -> Tensor:
        positions = TokenPositions.plain(x.shape[1])
        keys = dict.fromkeys(model.kinds, positions)
        passes = model.passes(len(x), model.prepare(positions), keys)
        return module(x, passes["all"], None)

    return module, run


def put(weights: dict[Tensor, Tensor]) -> None:
    """Copy each weight of ours into theirs, in their shape."""
    for theirs, ours in weights.items():
        theirs.copy_(ours.reshape(theirs.shape))


def olmo_hybrid(beta_max: float) -> tuple[nn.Module, Callable]:
    ours, run = mixer({**GATED_DELTANET, "beta_max": beta_max}, heads=6, kv_heads=3, head_dim=10)
    config = olmo.OlmoHybridConfig(
        hidden_size=C,
        linear_num_value_heads=6,
        linear_num_key_heads=3,
        linear_key_head_dim=10,
        linear_value_head_dim=14,
        linear_conv_kernel_dim=4,
        linear_allow_neg_eigval=beta_max == 2,
    )
    theirs = olmo.OlmoHybridGatedDeltaNet(config, 0)
    put(
        {
            theirs.q_proj.weight: ours.wq.weight,
            theirs.k_proj.weight: ours.wk.weight,
            theirs.v_proj.weight: ours.wv.weight,
            theirs.a_proj.weight: ours.w_decay.weight,
            theirs.b_proj.weight: ours.w_beta.weight,
            theirs.g_proj.weight: ours.w_gate.weight,
            theirs.o_proj.weight: ours.wo.weight,
            theirs.conv1d.weight: ours.convolution.weight,
            theirs.A_log: ours.decay_rate,
            theirs.dt_bias: ours.decay_bias,
            theirs.o_norm.weight: ours.output_norm,
        }
    )
    return theirs, run


def kimi_linear() -> tuple[nn.Module, Callable]:
    ours, run = mixer(KDA, heads=3, kv_heads=3, head_dim=10)
    config = kimi.KimiLinearConfig(
        hidden_size=C,
        linear_num_heads=3,
        linear_head_dim=10,
        linear_conv_kernel_dim=4,
        num_hidden_layers=4,
        rms_norm_eps=1e-6,
    )
    theirs = kimi.KimiLinearDeltaAttention(config, 0)
    put(
        {
            theirs.q_proj.weight: ours.wq.weight,
            theirs.k_proj.weight: ours.wk.weight,
            theirs.v_proj.weight: ours.wv.weight,
            theirs.b_proj.weight: ours.w_beta.weight,
            theirs.o_proj.weight: ours.wo.weight,
            theirs.forget_gate.f_a_proj.weight: ours.w_decay[0].weight,
            theirs.forget_gate.f_b_proj.weight: ours.w_decay[1].weight,
            theirs.g_a_proj.weight: ours.w_gate[0].weight,
            theirs.g_b_proj.weight: ours.w_gate[1].weight,
            theirs.conv1d.weight: ours.convolution.weight,
            theirs.forget_gate.A_log: ours.decay_rate,
            theirs.forget_gate.dt_bias: ours.decay_bias,
            theirs.o_norm.weight: ours.output_norm,
        }
    )
    return theirs, run


def mamba(groups: int) -> tuple[nn.Module, Callable]:
    ours, run = mixer(MAMBA2, heads=4, kv_heads=groups, head_dim=10)
    config = mamba2.Mamba2Config(
        hidden_size=C,
        num_heads=4,
        head_dim=14,
        state_size=10,
        n_groups=groups,
        expand=2,
        conv_kernel=4,
        use_conv_bias=True,
        use_bias=False,
        num_hidden_layers=2,
        chunk_size=16,
        layer_norm_epsilon=1e-6,
    )
    theirs = mamba2.Mamba2Mixer(config, 0)

    def reversed_parts(x: Tensor) -> Tensor:  # theirs are values, keys, queries
        return torch.cat(x.split(ours.sizes)[::-1])

    joined = [ours.w_gate, ours.wv, ours.wk, ours.wq, ours.w_decay]
    put(
        {
            theirs.in_proj.weight: torch.cat([linear.weight for linear in joined]),
            theirs.conv1d.weight: reversed_parts(ours.convolution.weight),
            theirs.conv1d.bias: reversed_parts(ours.convolution.bias),
            theirs.A_log: ours.decay_rate,
            theirs.dt_bias: ours.decay_bias,
            theirs.D: ours.skip,
            theirs.norm.weight: ours.output_norm,
            theirs.out_proj.weight: ours.wo.weight,
        }
    )
    return theirs, run


def lfm() -> tuple[nn.Module, Callable]:
    ours, run = mixer({"name": "short_convolution", "width": 3, "bias": True})
    config = lfm2.Lfm2Config(hidden_size=C, conv_L_cache=3, conv_bias=True)
    theirs = lfm2.Lfm2ShortConv(config, 0)
    put(
        {
            theirs.in_proj.weight: ours.w_in.weight,
            theirs.in_proj.bias: ours.w_in.bias,
            theirs.conv.weight: ours.convolution.weight,
            theirs.conv.bias: ours.convolution.bias,
            theirs.out_proj.weight: ours.wo.weight,
            theirs.out_proj.bias: ours.wo.bias,
        }
    )
    return theirs, run


@pytest.mark.parametrize(
    "pair",
    [
        lambda: olmo_hybrid(1.0),
        lambda: olmo_hybrid(2.0),
        kimi_linear,
        lambda: mamba(1),
        lambda: mamba(2),
        lfm,
    ],
    ids=["olmo", "olmo-negative", "kimi", "mamba2", "mamba2-groups", "lfm2"],
)
@torch.no_grad()
def test_layers_equal_those_of_transformers(pair):
    with double_precision():
        theirs, run = pair()
        theirs = theirs.double().eval()
        x = torch.randn(2, TOKENS, C)
        assert difference(run(x), theirs(x)) < 1e-10


@pytest.mark.parametrize("query_rank", [None, 9])
@torch.no_grad()
def test_both_forms_of_latent_attention_equal_transformers(query_rank, monkeypatch):
    settings = {"name": "latent", "rank": 11, "query_rank": query_rank, "unrotated_dim": 6}
    settings["value_dim"] = 5
    rope = {"name": "rope", "layout": "interleaved"}
    ours, run = mixer(settings, rope, heads=3, kv_heads=1, head_dim=8)
    config = deepseek.DeepseekV3Config(
        hidden_size=C,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=query_rank,
        kv_lora_rank=11,
        qk_nope_head_dim=6,
        qk_rope_head_dim=8,
        v_head_dim=5,
        rope_interleave=True,
        attn_implementation="eager",
    )
    x = torch.randn(2, TOKENS, C, dtype=torch.float64)
    with double_precision():
        theirs = deepseek.DeepseekV3Attention(config, 0).double()
        weights = {
            theirs.kv_a_proj_with_mqa.weight: ours.w_down.weight,
            theirs.kv_a_layernorm.weight: ours.latent_norm.weight,
            theirs.kv_b_proj.weight: ours.w_up.weight,
            theirs.o_proj.weight: ours.wo.weight,
        }
        if query_rank is None:
            weights[theirs.q_proj.weight] = ours.wq.weight
        else:
            weights[theirs.q_a_proj.weight] = ours.wq_down.weight
            weights[theirs.q_a_layernorm.weight] = ours.q_norm.weight
            weights[theirs.q_b_proj.weight] = ours.wq.weight
        put(weights)
        angles = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
        mask = torch.full((1, 1, TOKENS, TOKENS), -1e30, dtype=torch.float64).triu(1)
        expected, _ = theirs(x, angles, mask)
    for is_absorbed in (True, False):
        monkeypatch.setattr(ours, "is_absorbed", lambda queries, keys, form=is_absorbed: form)
        assert difference(run(x), expected) < 1e-10


def without_documents(inputs: Inputs, before: Tensor | None) -> Inputs:
    """A state that is not reset where a document begins."""
    whole = ORIGINAL(inputs, before)
    return replace(whole, document=None if whole.document is None else whole.document * 0)


def decaying_padding(inputs: Inputs, before: Tensor | None) -> Inputs:
    """Padding that decays the state."""
    log_decay = ORIGINAL(replace(inputs, document=None), None).log_decay
    return replace(ORIGINAL(inputs, before), log_decay=log_decay)


ORIGINAL = Inputs.without_padding
FILTER = CausalConvolution.forward
FAULTS = {
    "state": (Inputs, "without_padding", without_documents, "gated_deltanet-none"),
    "padding": (Inputs, "without_padding", decaying_padding, "mamba2"),
    "convolution": (
        CausalConvolution,
        "forward",
        lambda self, x, document: FILTER(self, x, None),
        "short_convolution-none",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, monkeypatch):
    owner, name, wrong, case = FAULTS[fault]
    check = test_conformance.test_packed_documents_do_not_attend_to_each_other
    if fault == "padding":
        check = test_recurrence.test_padding_and_other_documents_have_no_effect
    check(case)
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        check(case)


@pytest.mark.parametrize("case", [*(f"{name}-rope" for name in RECURRENT), "latent-rope"])
@torch.no_grad()
def test_estimates_of_cached_numbers_are_exact(case):
    """States do not grow with the tokens; keys do."""
    model = build(case)
    for tokens in (6, 11):
        cache = model.make_cache(1, tokens)
        model(ids(1, tokens), TokenPositions.plain(tokens), cache=cache)
        numbers = 0
        for layer in cache.layers:
            if isinstance(layer, layer_state.LayerState):
                numbers += sum(x.numel() for x in layer._stored.values())
            else:
                numbers += sum(x.numel() for x in layer._buffers.values())
        assert numbers == model.cached_numbers(tokens)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@torch.no_grad()
def test_configurations_build_and_run(path: Path):
    changes = yaml.safe_load(path.read_text())["model"]
    settings = ModelSettings.model_validate({"dim": 96, "heads": 3, "layers": 2, **changes})
    model = Transformer(settings, V, 16).initialize(0)
    assert model(ids(2, 9)).isfinite().all()
