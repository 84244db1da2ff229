"""Models with a generated modeling file, loaded where this repository is not on the path."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from interop.build import build_model
from interop.checkpoint import read_folder
from interop.export import generated
from interop.export.modeling import SextantConfig, SextantForCausalLM
from model import SCHEMES, ModelSettings, TokenPositions, Transformer
from scripts.docs import support_matrix
from tests.interop.export.exported import GENERATED, check, load_in_fresh_process, write
from tests.interop.export.measured import record, trained
from tests.model.zoo import CASES, MIXER_CASES, TRAIN, V, build, close, settings_of

# Ways in which a scheme acts on attention and on the cache.
QUICK = [
    "fox-rotary",  # extras in the cache, settings created by the scheme
    "learned",  # a limit
    "rope-streaming",  # sinks, a remap with several views
    "pattern-fire",  # kinds with and without a window, a bias per pair
    "hybrid",  # recurrent layers, convolutions and attention
    "mamba2-none",
    "kda-rope",
    "latent-rope",
]


def check_generated(models: dict[str, Transformer], root: Path) -> None:
    """Loaded in a fresh process, and imported without their modeling file."""
    root.mkdir()
    for name, model in models.items():
        write(model, root / name, GENERATED)
    found = load_in_fresh_process(root)
    assert found.keys() == models.keys()
    for name, model in models.items():
        assert found[name]["class"] == "SextantForCausalLM"
        check(found[name], root / name, atol=1e-5)
        (root / name / "modeling_sextant.py").unlink()
        (root / name / "reference.safetensors").unlink()
        imported = build_model(read_folder(root / name)).model
        assert imported.settings == model.settings
        lengths = (imported.train_length, imported.original_length)
        assert lengths == (model.train_length, model.original_length)
        torch.testing.assert_close(imported.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_generated_models(tmp_path):
    models = {case: build(case, dtype=torch.float32) for case in QUICK}
    linear = {"mixer": {"name": "linear", "chunk": 4}, "tie_embeddings": True}
    models["linear"] = build({"name": "sinusoidal"}, dtype=torch.float32, **linear)
    capped = {"logit_softcap": 3.0, "mup": {"base_dim": 7}, "qk_norm": True, "layer_scale": True}
    # a bias by distance and declared length
    models["capped"] = build("alibi-auto", dtype=torch.float32, **capped)
    check_generated(models, tmp_path / "models")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(14))
def test_every_case(part, tmp_path):
    """Windows, patterns, remaps and scaling methods of every scheme, and every mixer."""
    cases = [*CASES, *MIXER_CASES][part::14]
    models = {case: build(case, dtype=torch.float32) for case in cases}
    check_generated(models, tmp_path / "models")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_every_row_of_the_support_matrix_after_20_steps(part, tmp_path):
    """Every scheme of the registry and its variants, by the class that its export uses."""
    root = tmp_path / "models"
    root.mkdir()
    text = torch.randint(0, V, (4, TRAIN + 1), generator=torch.Generator().manual_seed(1))
    rows = dict(list(enumerate(support_matrix.ROWS))[part::6])
    choices = {}
    for number, row in rows.items():
        model = trained(support_matrix.ROWS[row], V, TRAIN, text)
        choices[row] = write(model, root / f"{number:02}")
    found = load_in_fresh_process(root)
    figures = {}
    for number, row in rows.items():
        model_type = choices[row].model_type
        own = found[f"{number:02}"]
        is_exact = model_type is None or "dynamic" not in row
        check(own, root / f"{number:02}", 1e-5 if model_type is None else 1e-4, is_exact)
        difference = max(own[key] for key in ("plain", "padded")[: 1 + is_exact])
        name = model_type or support_matrix.GENERATED
        figures[row] = support_matrix.ROWS[row], name, difference
    record(figures)


def test_the_support_matrix_is_current():
    text = support_matrix.DOCUMENT.read_text(encoding="utf-8")
    assert support_matrix.filled(text) == text, "python scripts/docs/support_matrix.py"


def test_the_generated_file_imports_only_installed_packages():
    """And contains only the schemes that the model needs."""
    source = generated.source(settings_of(CASES["alibi"]))
    tree = ast.parse(source)
    imported = set(re.findall(r"^(?:from|import) (\w+)", source, flags=re.M))
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {"Alibi", "AlibiSettings", "SextantForCausalLM"} <= classes
    assert not {"Rope", "T5", "LinearAttention", "YaRNScaling", "SettingsFile"} & classes


def test_gradients_registered_with_an_operation_are_copied():
    source = generated.source(settings_of(CASES["t5"]))
    for name in ("biased_attention", "with_table_gradient"):
        assert source.count(f"@{name}.register_fake") == 1
        assert source.count(f"{name}.register_autograd(") == 1


def test_names_are_unique_in_the_model_code():
    """A model may combine any schemes: their definitions share one file."""
    kinds = {name: {"position": {"name": name}} for name in SCHEMES}
    settings = ModelSettings(layers=len(kinds), pattern=list(kinds), kinds=kinds)
    source = generated.source(settings)
    names = [
        n.name for n in ast.parse(source).body if isinstance(n, ast.ClassDef | ast.FunctionDef)
    ]
    assert len(names) == len(set(names))


def test_a_loaded_copy_of_the_model_code_leaves_the_operators_of_this_one(tmp_path, monkeypatch):
    def gradient() -> torch.Tensor:
        net = build("fox").train()
        tokens = torch.arange(6)[None] % V
        loss = net(tokens, TokenPositions.plain(6)).square().mean()
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        return torch.cat([each.flatten() for each in gradients])

    before = gradient()
    (tmp_path / "copied_model_code.py").write_text(generated.source(settings_of(CASES["fox"])))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("copied_model_code")
    assert gradient().equal(before)


@pytest.fixture
def wrapper():
    """The wrapper of the generated file, with the model code of this repository."""
    model = build("alibi", dtype=torch.float32)
    found = SextantForCausalLM(SextantConfig(**generated.config(model)))
    found.model.load_state_dict(model.state_dict())
    return found.eval()


@torch.no_grad()
def test_a_cache_of_unknown_length_grows(wrapper):
    ids = torch.randint(0, V, (2, 600), generator=torch.Generator().manual_seed(2))
    whole = wrapper(ids).logits
    past = None
    parts = []
    for start in range(0, 600, 150):
        out = wrapper(ids[:, start : start + 150], past_key_values=past, use_cache=True)
        past = out.past_key_values
        parts.append(out.logits)
    assert past.get_seq_length() == 600
    close(torch.cat(parts, 1), whole, atol=1e-5)


@torch.no_grad()
def test_beam_search_with_and_without_a_cache(wrapper):
    ids = torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    for attention_mask in (None, mask):
        options = {"attention_mask": attention_mask, "num_beams": 3, "max_new_tokens": 6}
        options["pad_token_id"] = 0
        cached, recomputed = (wrapper.generate(ids, use_cache=c, **options) for c in (True, False))
        assert cached.tolist() == recomputed.tolist()


@torch.no_grad()
def test_right_padding_does_not_change_logits(wrapper):
    ids = torch.randint(0, V, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    found = wrapper(ids, attention_mask=mask).logits[1, :8]
    close(found, wrapper(ids[1:, :8]).logits[0], atol=1e-5)


def test_unsupported_inputs_are_refused(wrapper):
    ids = torch.arange(6)[None]
    for options in (
        {"inputs_embeds": torch.zeros(1, 6, 28)},
        {"position_ids": torch.arange(6)[None] + 1},
        {"output_attentions": True},
        {"past_key_values": object()},
        {"attention_mask": torch.ones(1, 5)},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            wrapper(ids, **options)
    out = wrapper(ids, position_ids=torch.arange(6)[None])
    assert out.past_key_values is None
    assert out.logits.requires_grad
