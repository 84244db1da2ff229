"""Older and unusual forms of configurations and folders, compared with transformers' own reading."""

import itertools
import json
import sys
from typing import Any

import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from errors import InteropError
from interop.build import build_model
from interop.checkpoint import read_folder
from interop.huggingface.config import family_keys, read_config
from interop.huggingface.families import FAMILIES
from model import SCHEMES, ModelSettings
from model.mixers.recurrent import RecurrentMixer
from model.position.scaling import YaRNScaling, plain_frequencies
from tests.interop.models import ABSENT, ROPES, SMALL, VARIANTS, make, variant
from tests.interop.test_families import check_plain
from tests.model.zoo import CONFIGS


def rewritten(theirs: PreTrainedModel, folder, **keys) -> ModelSettings:
    """Import a model that is saved with other keys in its config.json; `rope_parameters` is left
    out. transformers reads it too, for the expected logits."""
    theirs.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | keys
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    found = build_model(read_folder(folder))
    check_plain(found.model, AutoModelForCausalLM.from_pretrained(folder).eval())
    return found.shape.model


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("rope", ["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
def test_legacy_rope_theta_and_rope_scaling(key, rope, tmp_path):
    scaling = {k: v for k, v in ROPES[rope].items() if k not in ("rope_theta", "rope_type")}
    scaling = None if rope == "default" else {key: rope, **scaling}
    found = rewritten(make("llama"), tmp_path, rope_theta=700.0, rope_scaling=scaling)
    assert found.position.theta == 700.0


@pytest.mark.parametrize("scaling", [{"type": "longrope"}, {"type": "su"}], ids=str)
def test_legacy_phi3(scaling, tmp_path):
    """Both lengths beside the parameters, as released; `su` is the first name of longrope."""
    original = {"original_max_position_embeddings": 32}
    scaling |= {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 4.0], **original}
    theirs = make("phi3", head_dim=ABSENT, hidden_size=36)
    rewritten(theirs, tmp_path, rope_theta=700.0, rope_scaling=scaling, **original)


@pytest.mark.parametrize(
    ("model_type", "theta"),
    [
        ("olmo3", {}),
        ("olmo3", {"rope_theta": 500_000.0}),
        ("gemma3_text", {"rope_theta": 500.0, "rope_local_base_freq": 90.0}),
    ],
)
def test_legacy_parameters_by_layer_type(model_type, theta, tmp_path):
    """`rope_scaling` is that of the layers without windows, as in the released configurations."""
    theirs = make(model_type, sliding_window=9, layer_types=VARIANTS["qwen3"]["layer_types"])
    kinds = rewritten(theirs, tmp_path, rope_scaling=ROPES["yarn"], **theta).resolved_kinds.values()
    assert {(kind.position.window, kind.position.scaling.name) for kind in kinds} == {
        (9, "none"),
        (None, "yarn"),
    }


def test_sizes_of_gemma4_as_released(tmp_path):
    """Keys for full layers instead of `per_layer_config`, which transformers writes today."""
    theirs = variant("gemma4_text, k = v")
    theirs.save_pretrained(tmp_path)
    expected = build_model(read_folder(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["per_layer_config"]
    config |= {"global_head_dim": 12, "num_global_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert build_model(read_folder(tmp_path)).shape.model == expected.shape.model


def test_old_names_of_layer_types():
    config = variant("granitemoehybrid").config.to_dict()
    old = {"linear_attention": "mamba", "full_attention": "attention"}
    changed = config | {"layer_types": [old[name] for name in config["layer_types"]]}
    assert read_config(changed, "config.json") == read_config(config, "config.json")


NAMED = ("intermediate_size", "vocab_size", "max_position_embeddings", "pad_token_id")
SIZES = {name: SMALL[name] for name in NAMED}
SIZES |= {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 32}
DENSE = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"num_local_experts": 0},
    "deepseek_v3": {"first_k_dense_replace": 5},
    "kimi_linear": {"mlp_layer_types": ["dense"] * 5},
}


@pytest.mark.parametrize(
    "model_type", [name for name, family in FAMILIES.items() if family.code is None]
)
def test_absent_keys_have_the_defaults_of_transformers(model_type):
    """Older versions left out keys with the defaults of their class."""
    dense = DENSE.get(model_type, {})
    defaults = AutoConfig.for_model(model_type, **SIZES, **dense)
    config = json.loads(json.dumps(defaults.to_dict()))
    family = FAMILIES[model_type]
    read = {"layer_types", "rope_parameters", *family.defaults, *family.computed}
    read |= {getattr(key, "name", key) for key in family_keys(family).values()}
    kept = {*SIZES, "qk_rope_head_dim", "head_dim", "num_key_value_heads"}
    bare = {key: value for key, value in config.items() if key not in read - kept}
    assert read_config({**bare, **dense}, "config.json") == read_config(config, "config.json")


@given(
    theta=st.sampled_from([3.0, 50.0, 10_000.0]),
    original=st.integers(1, 4000),
    betas=st.tuples(st.floats(0.1, 10), st.floats(10.1, 40)),
    head_dim=st.sampled_from([4, 10, 16]),
    truncate=st.booleans(),
)
@example(10_000.0, 6, [1.0, 32.0], 10, True)  # 6 < 2π: every pair turns less than beta_slow times
@example(3.0, 4000, [1.0, 2.0], 10, False)  # every pair turns more than beta_fast times
@settings(max_examples=100)
def test_yarn_ramp_matches_transformers_or_is_rejected(theta, original, betas, head_dim, truncate):
    slow, fast = betas
    keys = {"factor": 4.0, "beta_fast": fast, "beta_slow": slow, "truncate": truncate}
    lengths = {"original_max_position_embeddings": original}
    rope = {"rope_type": "yarn", "rope_theta": theta, **lengths, **keys}
    config = LlamaConfig(**(SMALL | {"head_dim": head_dim, "rope_parameters": rope}))
    theirs, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    scaling = YaRNScaling(**keys)
    ours = scaling.frequencies(plain_frequencies(theta, head_dim), 4.0, original)
    far = (ours[0] / theirs.double() - 1).abs().max()
    try:
        found = read_config(config.to_dict() | {"rope_parameters": rope}, "config.json")
    except InteropError as error:
        assert "original_max_position_embeddings" in str(error)
        # With truncate, a ramp that begins at the last index is rounded to one that agrees.
        assert truncate or far > 0.5
    else:
        assert found.model.position.scaling == scaling
        assert far < 1e-5
        assert ours[1] == pytest.approx(amplitude)


# Kinds of rotary parameters, without their factors, bases and lengths.
KINDS = {
    "linear": {},
    "dynamic": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 6.0, "beta_slow": 0.7},
    "longrope": {"short_factor": [1, 1, 1.1, 1.2, 1.5], "long_factor": [1, 1.5, 2, 3, 4.5]},
}
LENGTH = "original_max_position_embeddings"


def given_keys(**keys) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}


def check_rotation(model_type: str, config: dict, kind: str, layer_type: str | None = None):
    """The layers without windows rotate as those of transformers, below and beyond 64 tokens; returns
    their positional settings and transformers' rotary parameters."""
    config = {**SMALL, **VARIANTS[model_type], **config, "model_type": model_type}
    config = {key: value for key, value in config.items() if value != ABSENT}
    theirs = type(AutoConfig.for_model(model_type)).from_dict(json.loads(json.dumps(config)))
    shape = read_config(config, "config.json")
    (own,) = (
        layer
        for layer in shape.model.resolved_kinds.values()
        if layer.position.name != "none" and layer.position.window is None
    )
    geometry = own.geometry(shape.train_length, shape.original)
    scheme = SCHEMES[own.position.name][1](own.position, geometry)
    for length in (3, 200) if kind in ROPE_INIT_FUNCTIONS else ():
        expected = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", length, layer_type=layer_type)
        found = scheme.frequencies(scheme.stretch(length))
        torch.testing.assert_close(found[0].float(), expected[0], rtol=3e-5, atol=0)
        assert found[1] == pytest.approx(expected[1])
    return own.position, theirs.rope_parameters


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", KINDS)
def test_rotary_keys_in_each_place(kind, key):
    """Among the rotary parameters, beside them, in both places with different values, and in
    neither; factors below 1 and null."""
    places = ((None, 16), (None, 32, 128), (None, 500.0), (None, 700.0), (None, 4.0, 0.5))
    for inside, outside, theta, other_theta, factor in itertools.product(*places):
        parameters = {"rope_type": kind, "type": "default", **KINDS[kind], "factor": factor}
        parameters |= given_keys(**{LENGTH: inside}, rope_theta=theta)
        config = {key: parameters, **given_keys(**{LENGTH: outside}, rope_theta=other_theta)}
        if kind in ("yarn", "longrope"):
            factor = factor or 64 / (outside or inside or 64)
        if not factor or (factor < 1 and kind not in ("dynamic", "longrope")):
            with pytest.raises(InteropError, match="factor"):
                check_rotation("llama", config, kind)
        else:
            check_rotation("llama", config, kind)


def test_rotary_keys_of_families():
    """Beside parameters of layer types, a length is ignored. Ministral 3's temperature has the length
    of the frequencies, or the one inside where these have none."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, **KINDS["yarn"]}
    near = {"rope_type": "default", "rope_theta": 90.0}
    for inside, outside in itertools.product((None, 8), (None, 128)):
        full = yarn | given_keys(**{LENGTH: inside})
        beside = given_keys(**{LENGTH: outside})
        nested = {"full_attention": full, "sliding_attention": near}
        config = {"rope_parameters": nested, **beside}
        check_rotation("olmo3", config, "yarn", "full_attention")
        scaled = {**full, "llama_4_scaling_beta": 0.3}
        for kind in ("yarn", "linear") if inside else ("yarn",):
            config = {"rope_parameters": {**scaled, "rope_type": kind}, **beside}
            position, theirs = check_rotation("ministral3", config, kind)
            assert position.temperature.length == theirs[LENGTH]
    linear = {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}
    legacy_too = {"rope_scaling": linear, "rope_parameters": {**linear, "factor": 5.0}}
    check_rotation("llama", legacy_too, "linear")
    for inside, outside in itertools.product((None, 0.4), (None, 0.8)):
        parameters = linear | given_keys(partial_rotary_factor=inside)
        beside = given_keys(partial_rotary_factor=outside)
        check_rotation("qwen3_5_text", {"rope_parameters": parameters, **beside}, "linear")
        proportional = {**parameters, "rope_type": "proportional"}
        check_rotation("llama", {"rope_parameters": proportional, **beside}, "proportional")


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_attention_factors(model_type):
    """Amplitudes of cos and sin, and DeepSeek's factor on q·k, which is 1 for factors below 1; without
    the ends of yarn's ramp."""
    rope = {"rope_theta": 500.0, LENGTH: 4096, "truncate": False}
    mscales = ((None, 0.7, 0), (None, 1.2, 0))
    cases = [
        (
            "yarn",
            {
                "factor": 4.0,
                **given_keys(attention_factor=given, mscale=own, mscale_all_dim=all_dim),
            },
        )
        for given, own, all_dim in itertools.product((None, 1.3), *mscales)
    ]
    kinds = ("linear", "llama3", "default")
    cases += [(kind, {"factor": 2.0, "mscale_all_dim": 1.2}) for kind in kinds]
    cases += [("dynamic", {"factor": factor, "mscale_all_dim": 1.2}) for factor in (0.5, 2.0)]
    if model_type == "llama":  # whose heads have as many pairs as the lists
        cases += [("longrope", {"factor": 4.0, "attention_factor": 1.25})]
    for kind, keys in cases:
        ramp = KINDS.get(kind, {}) if kind != "yarn" else {}
        parameters = {"rope_type": kind, **ramp, **rope, **keys}
        position, theirs = check_rotation(model_type, {"rope_parameters": parameters}, kind)
        factor = yarn_apply_mscale(theirs, 1.0) if model_type == "deepseek_v3" else 1.0
        assert getattr(position.temperature, "value", 1.0) == pytest.approx(factor)


SIZES_OF_LAYERS = {"name", "chunk", "value_dim", "decay_rank", "gate_rank", "output_norm_eps"}


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("mamba2", "bamba"), ("gated_deltanet", "qwen3_5_text"), ("kda", "kimi_linear")],
)
def test_layers_of_configs_are_those_of_transformers(name, model_type):
    """configs/mixer/, up to sizes, and transformers' default configuration."""
    theirs = AutoConfig.for_model(model_type, **SIZES, **DENSE.get(model_type, {}))
    kinds = read_config(json.loads(json.dumps(theirs.to_dict())), "config.json").model
    expected = {
        json.dumps(kind.mixer.model_dump(exclude=SIZES_OF_LAYERS))
        for kind in kinds.resolved_kinds.values()
        if kind.mixer.name == "recurrent"
    }
    given = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]["mixer"]
    own = RecurrentMixer.model_validate(given).model_dump(exclude=SIZES_OF_LAYERS)
    assert expected == {json.dumps(own)}


def test_shards_and_half_precision(tmp_path):
    variant("qwen2").to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="8KB")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    found = build_model(read_folder(tmp_path))
    assert len(found.checkpoint.files) > 2
    assert not (tmp_path / "model.safetensors").exists()
    check_plain(found.model, theirs)


def test_legacy_buffers_and_tied_head_are_ignored(tmp_path):
    theirs = variant("llama, tied")
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5),
        "lm_head.weight": load_file(file)["model.embed_tokens.weight"].clone(),
    }
    save_file(load_file(file) | extra, file)
    check_plain(build_model(read_folder(tmp_path)).model, theirs)


def test_code_of_a_model_is_never_run(tmp_path, monkeypatch):
    """Phi-3 was released with code of its own; transformers' class of the model type is what we
    compute."""
    theirs = make("llama")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("own", "modeling_llama", "configuration_llama", "tokenization_llama"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('code of a model was run')")
    monkeypatch.syspath_prepend(tmp_path)
    check_plain(build_model(read_folder(tmp_path)).model, theirs)
    assert "own" not in sys.modules
