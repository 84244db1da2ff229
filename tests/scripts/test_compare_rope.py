"""scripts/compare_rope.py on configs of released models, and on settings that differ from transformers."""

import json
import sys

import pytest

from errors import InteropError
from scripts import compare_rope

SHAPE = {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 99, "rms_norm_eps": 1e-5}
CONFIGS = {
    "SmolLM2": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000,
    },
    "Llama 3.1": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Qwen2.5": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    },
    "Phi-3": {  # with other divisors
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
        "pad_token_id": None,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1 + 0.02 * k for k in range(48)],
            "long_factor": [1 + 1.3 * k for k in range(48)],
        },
    },
    "dynamic": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "linear": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_scaling": {"type": "linear", "factor": 3.0},
    },
    "Bloom": {"model_type": "bloom", "n_head": 12},
    "MPT": {"model_type": "mpt", "n_heads": 16, "max_seq_len": 512},
}


def run(monkeypatch, capsys, *words) -> tuple[int, list[dict]]:
    monkeypatch.setattr(sys, "argv", ["compare_rope.py", *map(str, words), "--json"])
    status = compare_rope.main()
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", CONFIGS)
def test_released_configs(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | CONFIGS[name]))
    lengths = ["--lengths", 300, 2000] if name in ("dynamic", "linear") else []
    status, found = run(monkeypatch, capsys, tmp_path, *lengths)
    assert status == 0
    assert {one["other"] for one in found} == {"transformers", "paper"}
    differs = {(one["quantity"], one["dimension"]) for one in found if one["exceeds"]}
    if name != "Qwen2.5":
        assert not differs
        return
    # The ramp of YaRN's released code, and of transformers, is not that of its paper.
    assert {one["other"] for one in found if one["exceeds"]} == {"paper"}
    frequency = next(
        one for one in found if one["quantity"] == "frequency" and one["other"] == "paper"
    )
    assert frequency["dimension"] == 32 and frequency["size"] == pytest.approx(0.416, abs=1e-3)


SMALL = [
    "model.dim=64",
    "model.heads=4",
    "model.layers=1",
    "train_length=256",
    "data.tokenizer.name=bytes",
]


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "small.yaml").write_text("{}")
    return tmp_path / "small.yaml"


@pytest.mark.parametrize(
    "position",
    [
        "{name: rope}",
        "{name: rope, theta: 500, fraction: 0.5}",
        "{name: rope, scaling: {name: llama3, factor: 4}}",
        "{name: rope, scaling: {name: yarn, factor: 4, truncate: false}}",
        "{name: rope, fraction: 0.5, scaling: {name: longrope, factor: 2, long_factor: [1, 2, 3, 4]}}",
        "{name: alibi}",
    ],
)
def test_settings(position, settings, monkeypatch, capsys):
    words = [settings, *SMALL, f"model.position={position}", "--lengths", 256, 900]
    status, found = run(monkeypatch, capsys, *words)
    assert status == 0 and {one["length"] for one in found} == {256, 900}
    assert not any(one["exceeds"] for one in found if one["other"] == "transformers")


def test_a_difference_is_located(settings, monkeypatch, capsys):
    """Slopes that Bloom does not have, and a frequency that transformers does not have."""
    slopes = "model.position={name: alibi, slopes: [0.25, 0.0625, 0.02, 0.00390625]}"
    status, found = run(monkeypatch, capsys, settings, *SMALL, slopes, "--lengths", 100)
    assert status == 1
    slope, bias = (one for one in found if one["other"] == "transformers")
    assert slope["dimension"] == 2 and slope["size"] == pytest.approx(0.02 / 0.02 - 0.015625 / 0.02)
    assert (bias["dimension"], bias["position"]) == (2, 99)
    assert bias["size"] == pytest.approx(99 * (0.02 - 0.015625), rel=1e-4)
    plain = compare_rope.our_table

    def perturbed(*arguments):
        table = plain(*arguments)
        table.frequencies[5] *= 1 + 1e-5
        return table

    monkeypatch.setattr(compare_rope, "our_table", perturbed)
    status, found = run(monkeypatch, capsys, settings, *SMALL, "--lengths", 100)
    assert status == 1
    (one,) = (one for one in found if one["exceeds"] and one["other"] == "transformers")
    assert (one["quantity"], one["dimension"]) == ("frequency", 5)


def test_schemes_without_a_counterpart(settings, monkeypatch, capsys):
    for word in ("model.position={name: t5}", "model.position.scaling={name: yarn, factor: auto}"):
        with pytest.raises(InteropError):
            run(monkeypatch, capsys, settings, *SMALL, word)
    ntk = "model.position={name: rope, scaling: {name: ntk, factor: 2}}"
    with pytest.raises(InteropError, match="ntk"):  # neither transformers nor a formula here
        run(monkeypatch, capsys, settings, *SMALL, ntk)
