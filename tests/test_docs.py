"""What the documents say is what the code does."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import torch

from model import SCHEMES, Cache, Places, Transformer
from tests.model.zoo import V, close, ids, settings_of

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_of_positions_is_what_the_registry_says():
    line = [sys.executable, str(ROOT / "scripts" / "document_positions.py"), "--check"]
    found = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_scheme_names_its_source_or_says_it_has_none():
    for name, (settings, scheme) in SCHEMES.items():
        text = f"{settings.__doc__} {scheme.__doc__}"
        assert re.search(r"arXiv:\d{4}\.\d{4,5}|without a paper|He and Xu", text), name


def test_every_setting_of_a_scheme_is_described():
    for name, (settings, _) in SCHEMES.items():
        for key, field in settings.model_fields.items():
            assert key == "name" or (field.description and len(field.description) > 8), f"{name}.{key}"


def walkthrough() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text[text.index("## Adding a positional scheme") :]


def test_the_walk_through_stays_short():
    assert len(walkthrough().splitlines()) < 60


@torch.no_grad()
def test_the_example_of_the_walk_through_works(tmp_path, monkeypatch):
    """Its file is written, registered and run: cache against full pass, and the penalty by hand."""
    code = re.search(r"```python\n(.*?)```", walkthrough(), flags=re.S)
    assert code is not None
    file = tmp_path / "root.py"
    file.write_text(code[1], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("root_example", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(SCHEMES, "root", (module.RootSettings, module.Root))
    shape = settings_of({"name": "none"}).model_copy(update={"position": module.RootSettings()})
    model = Transformer(shape, V, 11).initialise(0).double().eval()
    tokens = ids(2, 19)
    whole, cache = model(tokens, Places.plain(19)), Cache(model, 2, 19)
    parts = [model(tokens[:, n : n + 1], Places.plain(1, offset=n), cache=cache) for n in range(19)]
    close(torch.cat(parts, dim=1), whole)
    without = Transformer(settings_of({"name": "none"}), V, 11).initialise(0).double().eval()
    assert (without(tokens, Places.plain(19)) - whole).abs().max() > 1e-3
