"""Only the setting `parent` makes train.py look for a foreign model."""

import sys

import pytest

import interop.imported_runs
import train
from errors import UserError


@pytest.mark.parametrize(
    ("words", "imports"),
    [
        (["data.source.path=apparent/"], False),
        (["parent.run=x"], True),
        (["parent={run: x}"], True),
        (["{file}"], True),
    ],
)
def test_foreign_parents_are_looked_for_only_where_one_is_set(
    words, imports, tmp_path, monkeypatch
):
    file = tmp_path / "x.yaml"
    file.write_text("parent: {run: x}\n")
    seen = []

    def note(overrides):
        seen.append(overrides)
        return overrides

    monkeypatch.setattr(interop.imported_runs, "with_imported_parent", note)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    words = [word.format(file=file) for word in words] if "{file}" in words else words
    with pytest.raises(UserError):
        train.main([*words, "training.tokens=nothing", f"--run-dir={tmp_path / 'run'}"])
    assert bool(seen) == imports
