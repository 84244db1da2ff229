"""Write the support matrix of docs/interop.md: how transformers loads each scheme.

  python scripts/docs/support_matrix.py

The class of transformers, or why there is none, follows from the code that exports. A cell is
"tested" if docs/results/exports.json has a result of this row with the same settings and the same
class. A slow test of tests/interop/export/test_generated.py writes this file: it trains and exports
every row and loads it in transformers.
"""

import hashlib
import json
from pathlib import Path

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
NOPE_4 = {
    "pattern": ["rope", "rope", "rope", "none"],
    "kinds": {"rope": {"position": {"name": "rope"}}, "none": {"position": {"name": "none"}}},
}
BASES = {
    "pattern": ["near", "far"],
    "kinds": {
        "near": {"position": {"name": "rope", "window": 16}},
        "far": {"position": {"name": "rope", "theta": 500_000}},
    },
}
MIXERS = {
    path.stem: read_yaml(path)[0]["model"]
    for path in sorted((ROOT / "configs" / "mixer").glob("*.yaml"))
}
MIXERS["kda"] |= {"head_dim": 32, "kv_heads": 4}  # the rank of its gates, and as many heads
MIXERS["latent"]["mixer"] |= {"norm_eps": 1e-6}  # of released models
FULL = {"position": {"name": "rope"}}


def _rope(**keys) -> dict:
    return {"position": {"name": "rope", **keys}}


def _hybrid(mixer: str, full: dict, **keys) -> dict:
    """Three layers with a mixer and one of another kind."""
    return {
        "pattern": ["state", "state", "state", "full"],
        "kinds": {"state": MIXERS[mixer], "full": full},
        **keys,
    }


# Row → model settings. Every scheme with its defaults, and the variants that change the class.
ROWS: dict[str, dict] = {
    **{f"`{name}`": {"position": {"name": name}} for name in SCHEMES},
    "`rope`, interleaved": _rope(layout="interleaved"),
    "`rope`, part of each head": _rope(fraction=0.5),
    "`rope`, window": _rope(window=16),
    "`rope`, window and sink tokens": _rope(window=16, sinks=4),
    "`rope`, learned sink logits": _rope(sink_logit="learned"),
    **{
        f"`rope`, scaling `{name}`": _rope(scaling={"name": name, "factor": 4.0})
        for name in ("linear", "ntk", "by_parts", "yarn", "llama3")
    },
    "`rope`, scaling `dynamic`": _rope(scaling={"name": "dynamic"}),
    "`rope`, scaling with factor `auto`": _rope(scaling={"name": "yarn"}),
    "`rope`, scaling `drop` (DroPE)": _rope(scaling={"name": "drop"}),
    "`rope`, resonance": _rope(resonance=True),
    "`rope`, remap (ReRoPE, Self-Extend, ...)": _rope(remap={"name": "rerope"}),
    "`rope`, temperature `fixed` or `head`": _rope(temperature={"name": "head"}),
    "`rope`, temperature `ministral3`": _rope(temperature={"name": "ministral3"}),
    "`rope`, temperature `log_n`, `ssmax`, ...": _rope(temperature={"name": "log_n"}),
    "`rope`, every fourth layer `none`": NOPE_4,
    "`rope` with two bases and windows": BASES,
    "`rope`, QK-norm": {**_rope(), "qk_norm": True},
    "`rope`, muP": {**_rope(), "mup": {"base_dim": 32, "base_head_dim": 8}},
    "`rope`, softcap of logits": {**_rope(), "logit_softcap": 30.0},
    **{f"mixer `{name}`": settings for name, settings in MIXERS.items()},
    "`gated_deltanet` and attention with an output gate (Qwen3.5)": _hybrid(
        "gated_deltanet", FULL | {"gate": "channel"}, qk_norm=True
    ),
    "`gated_deltanet` and attention with norms of outputs (Olmo Hybrid)": _hybrid(
        "gated_deltanet", FULL | {"norm_placement": "output"}, qk_norm="all_heads"
    ),
    "`mamba2` and attention without positions (Granite 4)": _hybrid(
        "mamba2", {"position": {"name": "none"}}
    ),
    "`kda` and latent attention without positions (Kimi Linear)": _hybrid(
        "kda", MIXERS["latent"] | {"position": {"name": "none"}}
    ),
    "`short_convolution` and attention (LFM2)": _hybrid("short_convolution", FULL, qk_norm=True),
    "`gated_deltanet` and attention": _hybrid("gated_deltanet", FULL),
}


def settings_digest(settings: dict) -> str:
    """Changes with the settings of a row, whose results are then those of another model."""
    return hashlib.sha256(json.dumps([SIZES, settings], sort_keys=True).encode()).hexdigest()[:12]


def measured() -> dict[str, dict]:
    """Row -> result."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def _state(row: str, settings: dict, name: str) -> str:
    """`tested` or `untested`."""
    result = measured().get(row, {})
    is_current = result.get("settings") == settings_digest(settings) and result.get("as") == name
    return "tested" if is_current else "untested"


def cell(row: str, settings: dict) -> str:
    """How transformers loads a row."""
    model = Transformer(ModelSettings.model_validate(SIZES | settings), 258, TRAINED).initialize(0)
    choice = choose_class(model)
    name = choice.model_type or GENERATED
    state = _state(row, settings, name)
    if choice.model_type is None:
        return f"{state}: {name} ({choice.reason})"
    # If frequencies follow the length, the cache keeps old keys, and all rows have that of the
    # longest.
    limits = " without cache and padding" if model.depends_on_length else ""
    return f"{state}{limits}: {name}"


def matrix() -> str:
    """The table in Markdown; rows with the same cell are one."""
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
