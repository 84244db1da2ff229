"""Write docs/positions.md: every positional scheme, modifier and sampler, from the registry and
docstrings.

    python scripts/docs/document_positions.py            write docs/positions.md
    python scripts/docs/document_positions.py --check    exit with status 1 if the file is out of date
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # needs no installation

from data.data_settings import DataSettings
from data.files import write_text
from evaluation.reports.document import markdown_table
from model import SCHEMES, ModelSettings
from model.model_settings import LayerKindSettings
from model.position import PositionalScheme, PositionSettings
from settings.script import Parser, run_main

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "positions.md"
COMMON = tuple(PositionSettings.model_fields)
INTRODUCTION = """\
All schemes of `model.position`. *Cached* is the form in which keys are cached; logits are the same with
and without a cache. *At test time* lists further settings that can be overridden on a trained
checkpoint; `window`, `sinks` and a temperature that is not learned can be overridden for every scheme
and are not listed. *Exempt from* lists conformance checks that do not apply to a scheme; its section
gives the reason."""

KINDS = """\
`model.pattern: [near, near, far]` names the kind of each layer and repeats over the depth; `model.kinds` describes
each, for example `near: {position: {name: rope, window: 128}}`. A change at test time such as `model.position.window=64`
applies to every kind that supports it, `model.kinds.far.position.window=64` to one."""

LEFT_OUT = """## Not included

- BiPE (arXiv:2401.16421) and Abacus (arXiv:2405.17399) require segment or digit indices from the loader.
- LieRE, ComRoPE, HARoPE: learned rotation generators, mostly for vision. CLEX (arXiv:2310.16450), TAPE
  (arXiv:2501.00712), Giraffe's truncated basis (arXiv:2308.10882), GRAPE's additive and contextual forms
  (arXiv:2512.07805), STRING (arXiv:2410.18745), DoPE (arXiv:2511.09146): no source was available to verify
  the formula.
- DAPE-V2 (arXiv:2410.04798): not built yet.
- Dynamic NTK with the current length: the logits of a prefix would change when text is appended, which makes
  caches invalid. `dynamic` uses the declared length, which is constant within a sequence.
"""


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    text = document()
    if parser.parse_args().check:
        same = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        print(
            "up to date"
            if same
            else f"{TARGET.name} is out of date: run scripts/docs/{Path(__file__).name}"
        )
        return 0 if same else 1
    write_text(TARGET, text)
    print(f"{TARGET}: {len(SCHEMES)} schemes")
    return 0


def document() -> str:
    """The whole page."""
    lines = [
        "# Positions",
        "",
        "<!-- Generated from the registry and docstrings by scripts/docs/document_positions.py -->",
        "",
        *INTRODUCTION.splitlines(),
        "",
    ]
    rows = []
    columns = ["scheme", "what it is", "cached", "at test time", "exempt from"]
    for name, (settings, scheme) in SCHEMES.items():
        legal = sorted(settings.test_time - PositionSettings.test_time)
        own = scheme.__dict__.get("exempt", {})
        exempt = ", ".join(own) if isinstance(own, dict) else ""
        summary = first_sentence(settings.__doc__)
        cells = [
            f"[{name}](#{name})",
            summary,
            scheme.cached_form,
            ", ".join(legal),
            exempt,
        ]
        rows.append([cell.replace("|", "\\|") or "–" for cell in cells])
    lines.append(markdown_table(columns, rows, texts=len(columns)))
    for name, (settings, scheme) in SCHEMES.items():
        lines += ["", f"## {name}", "", *scheme_section(settings, scheme)]
    lines += ["", "## With every scheme", "", field_table(PositionSettings, ("name",))]
    lines += ["", *choices_section("temperature", PositionSettings.model_fields["temperature"])]
    rope = SCHEMES["rope"][0]
    for key in rope.model_fields:
        options = choices(rope.model_fields[key].annotation)
        if key not in COMMON and options:
            lines += ["", *choices_section(key, rope.model_fields[key])]
    lines += ["", "## Kinds of layers", "", prose(LayerKindSettings.__doc__), ""]
    lines += [field_table(LayerKindSettings, ()), "", KINDS]
    lines += ["", *choices_section("mixer", ModelSettings.model_fields["mixer"])]
    lines += choices_section("data.positions", DataSettings.model_fields["positions"])
    lines += ["", LEFT_OUT]
    return "\n".join(lines).rstrip() + "\n"


def scheme_section(settings: type[PositionSettings], scheme: type[PositionalScheme]) -> list[str]:
    lines = [prose(scheme.__doc__), ""]
    lines.append(field_table(settings, COMMON) or "No settings of its own.")
    facts = []
    if not scheme.supports_fractions:
        facts.append("Positions must be whole numbers.")
    if not scheme.uses_position:
        facts.append(
            "Position numbers are not read; order comes from the causal mask and from content."
        )
    own = scheme.__dict__.get("exempt", {})
    if isinstance(own, dict):
        facts += [f"Exempt from the check `{check}`: {reason}." for check, reason in own.items()]
    return lines + (["", *facts] if facts else [])


def prose(doc: str | None) -> str:
    """A docstring as Markdown."""
    return inspect.cleandoc(doc or "").replace("``", "`")


def first_sentence(doc: str | None) -> str:
    text = " ".join(inspect.cleandoc(doc or "").split("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9)\]])\. (?=[A-Z])", text)[0].rstrip(".")


def field_table(cls: type[BaseModel], leave: tuple[str, ...]) -> str:
    """Settings of a class as a table, without those named in `leave`; '' if there are none."""
    fields = {key: field for key, field in cls.model_fields.items() if key not in (*leave, "name")}
    meanings = {key: (field.description or "").replace("|", "\\|") for key, field in fields.items()}
    rows = [[f"`{key}`", default(field), meanings[key]] for key, field in fields.items()]
    return markdown_table(["setting", "default", "meaning"], rows, texts=3) if rows else ""


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    if isinstance(value, BaseModel):
        value = getattr(value, "name", value)
    if value is None or isinstance(value, bool):
        value = {None: "null", True: "true", False: "false"}[value]
    return f"`{value}`"


def choices(annotation: Any) -> list[type[BaseModel]]:
    """The classes of a union discriminated by `name`."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    parts = get_args(annotation)
    classes = [p for p in parts if inspect.isclass(p) and issubclass(p, BaseModel)]
    return classes if len(classes) > 1 and "name" in classes[0].model_fields else []


def choices_section(title: str, field: FieldInfo) -> list[str]:
    """Each class of a discriminated union with its docstring and settings."""
    about = field.description or ""
    lines = [f"## {title}", "", f"{about[:1].upper()}{about[1:]}.", ""]
    for cls in choices(field.annotation):
        keys = [
            f"`{key}` ({default(f)}): {f.description}"
            for key, f in cls.model_fields.items()
            if key != "name"
        ]
        lines.append(f"### {title}: {cls.model_fields['name'].get_default()}")
        lines += ["", prose(cls.__doc__), ""]
        lines += [f"- {key}" for key in keys] + ([""] if keys else [])
    return lines


if __name__ == "__main__":
    run_main(main)
