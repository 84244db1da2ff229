"""Write docs/positions.md: every positional scheme, modifier and sampler, from the registry and
docstrings.

    python scripts/docs/document_positions.py            write docs/positions.md
    python scripts/docs/document_positions.py --check    exit with status 1 if the file is out of date
"""

import inspect
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # needs no installation

from data.data_settings import DataSettings
from data.files import write_text
from evaluation.reports.document import markdown_table
from model import SCHEMES, ModelSettings
from model.mixers.short_convolution import Canon
from model.model_settings import LayerKindSettings
from model.position import PositionalScheme, PositionSettings
from settings.script import Parser, run_main

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "positions.md"
COMMON = tuple(PositionSettings.model_fields)
HEAD = """# Positions

<!-- Generated from the registry and docstrings by scripts/docs/document_positions.py -->

All schemes of `model.position`. *Cached* is the form in which keys are cached; logits are the same with
and without a cache. *At test time* lists further settings that can be overridden on a trained
checkpoint; `window`, `sinks` and a temperature that is not learned can be overridden for every scheme
and are not listed. *Exempt from* lists conformance checks that do not apply to a scheme; its section
gives the reason."""

KINDS = """\
`model.pattern: [near, near, far]` names the kind of each layer and repeats over the depth; `model.kinds` describes
each, for example `near: {position: {name: rope, window: 128}}`. A change at test time such as `model.position.window=64`
applies to every kind that supports it, `model.kinds.far.position.window=64` to one."""

METHODS = """## Methods that are settings

Methods of papers that are settings of a scheme, a mixer or the model, and the command that trains each. `evaluate.py RUN
"lengths=[256,512,1024,2048]"` and `generate.py RUN --prompt "def "` then read its run, at one to eight times the length and
with its cache.

| method | settings | trained by |
| --- | --- | --- |
| Canon layers (arXiv:2512.17351) | `model.canon`, [below](#canon-layers) | `python train.py configs/tiny.yaml configs/position/canon.yaml` |
| Exclusive attention, XSA (arXiv:2603.09078) | `model.mixer.exclusive` | `python train.py configs/tiny.yaml configs/mixer/exclusive.yaml` |
| RoPE++ (arXiv:2512.07525) | `imaginary` of [rope](#rope) | `python train.py configs/tiny.yaml configs/position/rope_pp.yaml` |
| GRAPE-A, query-gated (arXiv:2512.07805) | scheme [grape_a](#grape_a) | `python train.py configs/tiny.yaml configs/position/grape_a.yaml` |
| GRAPE-AP (arXiv:2512.07805) | scheme [grape_ap](#grape_ap) | `python train.py configs/tiny.yaml configs/position/grape_ap.yaml` |
| CLEX (arXiv:2310.16450) | scheme [clex](#clex), `data.positions: random_multiple` | `python train.py configs/tiny.yaml configs/position/clex.yaml` |
| DAPE-V2 (arXiv:2410.04798) | `kernel` of [dape](#dape) | `python train.py configs/tiny.yaml configs/position/dape_v2.yaml` |
| STRING (arXiv:2410.18745) | `remap: string`, at test time | `python train.py configs/tiny.yaml configs/position/rope.yaml`, then `methods=[trained,string]` |
| Giraffe's truncated basis (arXiv:2308.10882) | `scaling: truncated` | `python train.py configs/tiny.yaml configs/position/rope_truncated.yaml` |
| Giraffe's power basis (arXiv:2308.10882) | `scaling: power` | `python train.py configs/tiny.yaml configs/position/rope_power.yaml` |
"""
LEFT_OUT = """## Not included

- BiPE (arXiv:2401.16421) and Abacus (arXiv:2405.17399) require segment or digit indices from the loader.
- LieRE, ComRoPE, HARoPE: learned rotation generators, mostly for vision. TAPE (arXiv:2501.00712),
  DoPE (arXiv:2511.09146): no source was available to verify the formula.
- GRAPE's contextual rotations and its key-gated biases (arXiv:2512.07805).
- Dynamic NTK with the current length: the logits of a prefix would change when text is appended, which makes
  caches invalid. `dynamic` uses the declared length, which is constant within a sequence.
"""


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    text = document()
    if parser.parse_args().check:
        is_current = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        advice = f"{TARGET.name} is out of date: run scripts/docs/{Path(__file__).name}"
        print("up to date" if is_current else advice)
        return int(not is_current)
    write_text(TARGET, text)
    print(f"{TARGET}: {len(SCHEMES)} schemes")
    return 0


def document() -> str:
    """The whole page."""
    blocks = [HEAD, summary()]
    for name, (settings, scheme) in SCHEMES.items():
        blocks += [f"## {name}", *scheme_section(settings, scheme)]
    blocks += ["## With every scheme", field_table(PositionSettings)]
    blocks += choices_section("temperature", PositionSettings)
    rope = SCHEMES["rope"][0]
    for key in rope.model_fields:
        if key not in COMMON and choices(rope.model_fields[key].annotation):
            blocks += choices_section(key, rope)
    blocks += [METHODS, "## Canon layers", prose(Canon)]
    blocks += [
        "## Kinds of layers",
        prose(LayerKindSettings),
        field_table(LayerKindSettings),
        KINDS,
    ]
    blocks += choices_section("mixer", ModelSettings)
    blocks += choices_section("positions", DataSettings, "data.")
    blocks.append(LEFT_OUT)
    return "\n\n".join(block.strip() for block in blocks if block) + "\n"


def summary() -> str:
    """A table with a row for each scheme."""
    rows = []
    for name, (settings, scheme) in SCHEMES.items():
        legal = sorted(settings.test_time - PositionSettings.test_time)
        cells = [
            f"[{name}](#{name})",
            first_sentence(settings),
            scheme.cached_form,
            ", ".join(legal),
            ", ".join(exemptions(scheme)),
        ]
        rows.append([cell.replace("|", "\\|") or "–" for cell in cells])
    columns = ["scheme", "what it is", "cached", "at test time", "exempt from"]
    return markdown_table(columns, rows, texts=len(columns))


def scheme_section(settings: type[PositionSettings], scheme: type[PositionalScheme]) -> list[str]:
    facts = []
    if not scheme.supports_fractions:
        facts.append("Positions must be whole numbers.")
    if not scheme.uses_position:
        facts.append(
            "Position numbers are not read; order comes from the causal mask and from content."
        )
    for check, reason in exemptions(scheme).items():
        facts.append(f"Exempt from the check `{check}`: {reason}.")
    table = field_table(settings, COMMON) or "No settings of its own."
    return [prose(scheme), table, "\n".join(facts)]


def exemptions(scheme: type[PositionalScheme]) -> dict[str, str]:
    """Conformance checks that do not apply to all models of a scheme, and why."""
    own = scheme.__dict__.get("exempt", {})
    return own if isinstance(own, dict) else {}


def prose(cls: type) -> str:
    """The docstring of a class as Markdown."""
    return inspect.cleandoc(cls.__doc__ or "").replace("``", "`")


def first_sentence(cls: type) -> str:
    text = " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9)\]])\. (?=[A-Z])", text)[0].rstrip(".")


def field_table(cls: type[BaseModel], leave: Sequence[str] = ()) -> str:
    """Settings of a class as a table, without those named in `leave`; '' if there are none."""
    rows = [
        [f"`{key}`", default(field), (field.description or "").replace("|", "\\|")]
        for key, field in cls.model_fields.items()
        if key not in (*leave, "name")
    ]
    return markdown_table(["setting", "default", "meaning"], rows, texts=3) if rows else ""


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        value = getattr(value, "name", value)
    if value is None or isinstance(value, bool):
        value = json.dumps(value)
    return f"`{value}`"


def choices(annotation: Any) -> list[type[BaseModel]]:
    """The classes of a union discriminated by `name`."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    parts = get_args(annotation)
    classes = [p for p in parts if inspect.isclass(p) and issubclass(p, BaseModel)]
    return classes if len(classes) > 1 and "name" in classes[0].model_fields else []


def choices_section(key: str, owner: type[BaseModel], prefix: str = "") -> list[str]:
    """Each class of a discriminated union with its docstring and settings."""
    field = owner.model_fields[key]
    about = field.description or ""
    blocks = [f"## {prefix}{key}", f"{about[:1].upper()}{about[1:]}."]
    for cls in choices(field.annotation):
        own = [
            f"- `{name}` ({default(part)}): {part.description}"
            for name, part in cls.model_fields.items()
            if name != "name"
        ]
        title = f"### {prefix}{key}: {cls.model_fields['name'].get_default()}"
        blocks += [title, prose(cls), "\n".join(own)]
    return blocks


if __name__ == "__main__":
    run_main(main)
