"""Imported models give the logits of transformers, past the trained length, left-padded and with a
cache."""

import json
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from interop import ImportedModel, InteropError, build_model, read_folder
from interop.huggingface.config import family_keys, read_config
from interop.huggingface.families import FAMILIES
from model import TokenPositions, Transformer
from model.position.scaling import YaRNScaling, plain_frequencies
from tests.interop.models import (
    ABSENT,
    QUICK,
    ROPES,
    SMALL,
    TYPES,
    VARIANTS,
    YARN,
    double_precision,
    in_double,
    make,
    variant,
)

ORIGINAL = {"original_max_position_embeddings": 32}
LENGTH = 100  # past the 64 trained tokens
COUNTS = [LENGTH, 71, 30]  # of the rows of a left-padded batch: past and within the trained length


def tokens_of(rows: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(
        0, SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(2)
    )


def close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.std() > 0.3, "flat logits would hide a difference"
    torch.testing.assert_close(
        got.double(),
        expected.double(),
        rtol=tolerance,
        atol=tolerance * float(expected.abs().max()),
    )


@torch.no_grad()
def check_plain(ours: Transformer, theirs: PreTrainedModel, tolerance: float = 1e-5) -> None:
    tokens = tokens_of(2)
    close(ours(tokens, TokenPositions.plain(LENGTH)), theirs(tokens).logits, tolerance)


@torch.no_grad()
def check_everything(ours: Transformer, theirs: PreTrainedModel) -> None:
    """Rows of several lengths in float64: alone, left-padded in one batch, and with our cache in
    chunks."""
    tokens = tokens_of()
    # Shortest first: transformers keeps the frequencies of the longest text so far with dynamic
    # NTK.
    expected = {
        row: theirs(tokens[row : row + 1, -COUNTS[row] :]).logits[0]
        for row in sorted(range(len(COUNTS)), key=lambda row: COUNTS[row])
    }
    padded = ours(tokens, TokenPositions.left_padded(COUNTS, LENGTH))
    for row, count in enumerate(COUNTS):
        close(
            ours(tokens[row : row + 1, -count:], TokenPositions.plain(count))[0],
            expected[row],
            1e-9,
        )
        close(padded[row, -count:], expected[row], 1e-9)
    positions = TokenPositions.left_padded(COUNTS, LENGTH)
    cache = ours.make_cache(len(COUNTS), LENGTH)
    parts = []
    start = 0
    for stop in (40, 41, 77, LENGTH):
        parts.append(ours(tokens[:, start:stop], positions.part(start, stop), cache=cache))
        start = stop
    for row, count in enumerate(COUNTS):
        close(torch.cat(parts, dim=1)[row, -count:], expected[row], 1e-9)


def saved(theirs: PreTrainedModel, folder) -> ImportedModel:
    theirs.save_pretrained(folder)
    return build_model(read_folder(folder))


SLOW_VARIANTS = [
    pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name not in QUICK
]


@pytest.mark.parametrize("name", [*QUICK, *SLOW_VARIANTS])
def test_architectures(name, tmp_path):
    theirs = variant(name)
    ours = saved(theirs, tmp_path).model
    # Recurrent layers multiply rounding errors of long products.
    is_recurrent = any(kind.mixer.name == "recurrent" for kind in ours.kinds.values())
    check_plain(ours, theirs, 1e-4 if is_recurrent else 1e-5)
    with double_precision():
        check_everything(ours.double(), in_double(theirs))


def test_every_family_has_a_variant():
    assert {model_type for model_type, _ in VARIANTS.values()} == FAMILIES.keys()


# Families that take rotary parameters like a Llama's; Phi-3 accepts longrope only.
SHARED_ROPE = ("llama", "smollm3", "mistral", "qwen2", "qwen3", "granite", "granite_swa", "olmo2")
QUICK_ROPES = (
    "linear",
    "dynamic",
    "dynamic, original length",
    "llama3",
    "yarn, all settings",
    "longrope",
)


def rope_cases() -> list:
    cases = [(family, rope) for family in SHARED_ROPE for rope in ROPES]
    quick = [("llama", rope) for rope in QUICK_ROPES]
    return quick + [
        pytest.param(*case, marks=pytest.mark.slow) for case in cases if case not in quick
    ]


@pytest.mark.parametrize(("family", "rope"), rope_cases())
def test_rope_kinds(family, rope, tmp_path):
    parameters = {"rope_theta": 10_000.0} | ROPES[rope]
    theirs = variant(family, rope_parameters=parameters)
    ours = saved(theirs, tmp_path).model
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    check_plain(ours, theirs)
    with double_precision():
        check_everything(ours.double(), in_double(theirs))


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("rope", ["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
def test_legacy_rope_theta_and_rope_scaling(key, rope, tmp_path):
    scaling = {k: v for k, v in ROPES[rope].items() if k not in ("rope_theta", "rope_type")}
    old = {
        "rope_theta": 700.0,
        "rope_scaling": None if rope == "default" else {key: rope, **scaling},
    }
    rewritten(make("llama"), tmp_path, rope_parameters=None, **old)
    # their own reading of the old form
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    found = build_model(read_folder(tmp_path))
    assert found.shape.model.position.theta == 700.0
    check_plain(found.model, theirs)


@pytest.mark.parametrize("scaling", [{"type": "longrope"}, {"type": "su", **ORIGINAL}], ids=str)
def test_legacy_phi3(scaling, tmp_path):
    """Both lengths beside the parameters, as released; `su` is the first name of longrope."""
    scaling |= {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 4.0]}
    theirs = make("phi3", head_dim=ABSENT, hidden_size=36)
    old = {"rope_theta": 700.0, "rope_scaling": scaling, **ORIGINAL}
    rewritten(theirs, tmp_path, rope_parameters=None, **old)
    check_plain(
        build_model(read_folder(tmp_path)).model,
        AutoModelForCausalLM.from_pretrained(tmp_path).eval(),
    )


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
    theirs = make(model_type, sliding_window=9, layer_types=TYPES)
    rewritten(theirs, tmp_path, rope_parameters=None, rope_scaling=YARN, **theta)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    found = build_model(read_folder(tmp_path))
    kinds = found.shape.model.resolved_kinds.values()
    assert {(kind.position.window, kind.position.scaling.name) for kind in kinds} == {
        (9, "none"),
        (None, "yarn"),
    }
    check_plain(found.model, theirs)


def rewritten(theirs: PreTrainedModel, folder, **keys) -> None:
    """Save a model with other keys in its config.json; None drops one unless it is meant to be
    null."""
    theirs.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | keys
    if config["rope_parameters"] is None:
        del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 44,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "vocab_size": 53,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
DENSE = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"num_local_experts": 0},
    "deepseek_v3": {"first_k_dense_replace": 5},
    "kimi_linear": {"mlp_layer_types": ["dense"] * 5},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_keys_have_the_defaults_of_transformers(model_type):
    """Older versions left out keys with the defaults of their class."""
    dense = DENSE.get(model_type, {})
    defaults = AutoConfig.for_model(model_type, **SIZES, **dense)
    config = json.loads(json.dumps(defaults.to_dict()))
    family = FAMILIES[model_type]
    read = {"layer_types", "rope_parameters", *family.defaults, *family.computed}
    read |= {getattr(key, "name", key) for key in family_keys(family).values()}
    bare = {key: value for key, value in config.items() if key not in read - SIZES.keys()}
    assert read_config({**bare, **dense}, "config.json") == read_config(config, "config.json")


@given(
    theta=st.sampled_from([3.0, 50.0, 10_000.0]),
    original=st.integers(1, 4000),
    betas=st.tuples(st.floats(0.1, 20), st.floats(0.1, 40))
    .map(sorted)
    .filter(lambda b: b[0] < b[1]),
    head_dim=st.sampled_from([4, 10, 16]),
    truncate=st.booleans(),
)
@example(10_000.0, 6, [1.0, 32.0], 10, True)  # 6 < 2π: every pair turns less than beta_slow times
@example(10_000.0, 2, [1.0, 32.0], 10, True)
# every pair turns more than beta_fast times, ramp past the last
@example(3.0, 4000, [1.0, 2.0], 10, True)
@example(3.0, 4000, [1.0, 2.0], 10, False)
@settings(max_examples=100)
def test_yarn_ramp_matches_transformers_or_is_rejected(theta, original, betas, head_dim, truncate):
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": 4.0,
        "original_max_position_embeddings": original,
        "beta_fast": betas[1],
        "beta_slow": betas[0],
        "truncate": truncate,
    }
    config = LlamaConfig(**(SMALL | {"head_dim": head_dim, "rope_parameters": rope}))
    theirs, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    keys = {
        "name": "yarn",
        "factor": 4.0,
        "beta_fast": betas[1],
        "beta_slow": betas[0],
        "truncate": truncate,
    }
    ours = YaRNScaling(**keys).frequencies(plain_frequencies(theta, head_dim), 4.0, original)
    try:
        found = read_config(config.to_dict() | {"rope_parameters": rope}, "config.json")
    except InteropError as error:
        assert "original_max_position_embeddings" in str(error)
        # With truncate, a ramp that begins at the last index is rounded to one that agrees.
        assert truncate or (ours[0] / theirs.double() - 1).abs().max() > 0.5
    else:
        assert found.model.position.scaling == YaRNScaling(**keys)
        torch.testing.assert_close(ours[0], theirs.double(), rtol=1e-5, atol=0)
        assert ours[1] == pytest.approx(amplitude)


def test_shards_and_half_precision(tmp_path):
    variant("qwen2").to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="8KB")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    found = build_model(read_folder(tmp_path))
    assert len(found.checkpoint.files) > 2 and not (tmp_path / "model.safetensors").exists()
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
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["own.T", None]}})
    )
    monkeypatch.syspath_prepend(tmp_path)
    check_plain(build_model(read_folder(tmp_path)).model, theirs)
    assert "own" not in sys.modules
