"""Write the support matrix of docs/interop.md: scheme × (transformers, GGUF, vLLM).

  python scripts/docs/support_matrix.py

The class of transformers or the architecture of llama.cpp, or why there is none, follows from the code that
exports. A cell is "tested" if docs/results/exports.json has a result of this row with the same settings and
the same class. Two slow tests write this file: every row is trained, exported and loaded in transformers by
tests/interop/export/test_generated.py, in llama.cpp by tests/interop/gguf/test_llama_cpp.py.
"""

import hashlib
import json
import re
from pathlib import Path

from errors import InteropError
from interop.export.classes import choose_class
from interop.gguf.writing.plan import make_plan
from model import SCHEMES, ModelSettings, Transformer

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "interop.md"
RESULTS = DOCUMENT.with_name("results") / "exports.json"
GENERATED = "generated file"
START = "<!-- support matrix -->"
END = "<!-- end of the support matrix -->"
SIZES = {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2}
TRAINED = 64
NOPE_4 = {
    "name": "pattern",
    "layers": ["rope", "rope", "rope", "none"],
    "kinds": {"rope": {"name": "rope"}, "none": {"name": "none"}},
}
BASES = {
    "name": "pattern",
    "layers": ["near", "far"],
    "kinds": {"near": {"name": "rope", "window": 16}, "far": {"name": "rope", "theta": 500_000}},
}


def _rope(**keys) -> dict:
    return {"position": {"name": "rope", **keys}}


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
    "`rope`, every fourth layer `none`": {"position": NOPE_4},
    "`rope` with two bases and windows": {"position": BASES},
    "`rope`, QK-norm": {**_rope(), "qk_norm": True},
    "`rope`, muP": {**_rope(), "mup": {"base_dim": 32, "base_head_dim": 8}},
    "`rope`, softcap of logits": {**_rope(), "logit_softcap": 30.0},
    "linear mixer": {**_rope(), "mixer": {"name": "linear"}},
}


def settings_digest(settings: dict) -> str:
    """Changes with the settings of a row, whose results are then those of another model."""
    return hashlib.sha256(json.dumps([SIZES, settings], sort_keys=True).encode()).hexdigest()[:12]


def measured() -> dict[str, dict[str, dict]]:
    """Target (`transformers`, `gguf`) -> row -> result."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def _state(target: str, row: str, settings: dict, name: str) -> str:
    """`tested` or `untested`."""
    found = measured().get(target, {}).get(row, {})
    has_result = (found.get("settings"), found.get("as")) == (settings_digest(settings), name)
    return "tested" if has_result else "untested"


def cells(row: str, settings: dict) -> tuple[str, str, str]:
    """transformers, GGUF and vLLM."""
    model = Transformer(ModelSettings.model_validate(SIZES | settings), 258, TRAINED).initialize(0)
    choice = choose_class(model)
    scheme = settings["position"]["name"]
    name = choice.model_type or GENERATED
    state = _state("transformers", row, settings, name)
    if choice.model_type is None:
        transformers = f"{state}: {name} ({choice.reason.removeprefix(f'{scheme} ')})"
        vllm = "impossible: the generated file has attention of its own"
    else:
        # If frequencies follow the length, the cache keeps old keys, and all rows have that of the longest.
        limits = " without cache and padding" if model.depends_on_length else ""
        transformers = f"{state}{limits}: {name}"
        vllm = f"untested: {name}"
    try:
        architecture = make_plan(model).architecture
        gguf = f"{_state('gguf', row, settings, architecture)}: {architecture}"
    except InteropError as error:
        gguf = f"impossible: {_reason(str(error), scheme)}"
    return transformers, gguf, vllm


def _reason(message: str, scheme: str) -> str:
    """The part of a refusal that names what llama.cpp does not compute."""
    found = re.search(r"computes (.*); export to", message, re.DOTALL)
    reason = found[1] if found else message.split(";")[0].split(": ")[-1]
    return "no architecture has it" if reason == scheme else reason


def matrix() -> str:
    """The table in Markdown."""
    lines = ["| | transformers | GGUF (llama.cpp) | vLLM |", "|---|---|---|---|"]
    lines += [f"| {row} | {' | '.join(cells(row, settings))} |" for row, settings in ROWS.items()]
    return "\n".join(lines)


def filled(text: str) -> str:
    """The document with a current matrix."""
    before, rest = text.split(START)
    return f"{before}{START}\n{matrix()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
