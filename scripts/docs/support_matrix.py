"""Write the support matrix of docs/interop.md: how transformers loads each scheme.

  python scripts/docs/support_matrix.py

The class of transformers, or why there is none, follows from the code that exports. A cell is
"tested" if docs/results/exports.json has a result of this row with the same settings and the same
class. A slow test of tests/interop/export/test_generated.py writes this file: it trains and exports
every row and loads it in transformers.
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # needs no installation

from interop.export.native import choose_class
from model import SCHEMES, ModelSettings, Transformer
from settings.yaml_io import read_yaml

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "interop.md"
RESULTS = DOCUMENT.with_name("results") / "exports.json"
GENERATED = "generated file"
START = "<!-- support matrix -->"
END = "<!-- end of the support matrix -->"
SIZES = {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2}
TRAINED = 64


def _rows() -> dict[str, dict]:
    """Row → model settings: every scheme with its defaults, the variants that change the class, and
    mixers alone and in hybrids."""
    table = read_yaml(Path(__file__).with_suffix(".yaml"))[0]
    mixers = {}
    for path in sorted((ROOT / "configs" / "mixer").glob("*.yaml")):
        settings = read_yaml(path)[0]["model"]
        changes = table["mixers"].get(path.stem, {})
        mixer = {**settings["mixer"], **changes.get("mixer", {})}
        mixers[path.stem] = {**settings, **changes, "mixer": mixer}
    rows = {f"`{name}`": {"position": {"name": name}} for name in SCHEMES}
    rows |= table["variants"]
    rows |= {f"mixer `{name}`": settings for name, settings in mixers.items()}
    for row, hybrid in table["hybrids"].items():
        full = {**mixers.get(hybrid.get("like"), {}), **hybrid["full"]}
        rows[row] = {
            "pattern": ["state", "state", "state", "full"],
            "kinds": {"state": mixers[hybrid["mixer"]], "full": full},
            **hybrid.get("settings", {}),
        }
    return rows


ROWS = _rows()


def settings_digest(settings: dict) -> str:
    """A digest of the settings of a row: results with another digest are of another model."""
    return hashlib.sha256(json.dumps([SIZES, settings], sort_keys=True).encode()).hexdigest()[:12]


def measured() -> dict[str, dict]:
    """The stored results, by row."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def _state(row: str, settings: dict, name: str) -> str:
    """`tested` or `untested`."""
    result = measured().get(row, {})
    is_current = result.get("settings") == settings_digest(settings) and result.get("as") == name
    return "tested" if is_current else "untested"


def cell(row: str, settings: dict) -> str:
    """The cell of a row: how transformers loads the model."""
    model = Transformer(ModelSettings.model_validate(SIZES | settings), 258, TRAINED).initialize(0)
    choice = choose_class(model)
    name = choice.model_type or GENERATED
    state = _state(row, settings, name)
    if choice.model_type is None:
        return f"{state}: {name} ({choice.reason})"
    # If frequencies depend on the length, the cache keeps old keys, and all rows use the length of
    # the longest row.
    limits = " without cache and padding" if model.depends_on_length else ""
    return f"{state}{limits}: {name}"


def matrix() -> str:
    """The table in Markdown; rows with equal cells are merged."""
    rows: dict[str, list[str]] = {}
    for row, settings in ROWS.items():
        rows.setdefault(cell(row, settings), []).append(row)
    lines = ["| | transformers |", "|---|---|"]
    lines += [f"| {'; '.join(names)} | {loaded} |" for loaded, names in rows.items()]
    return "\n".join(lines)


def filled(text: str) -> str:
    """The document with a current matrix."""
    before, rest = text.split(START)
    return f"{before}{START}\n{matrix()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
