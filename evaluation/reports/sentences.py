"""The summaries of reports, from the templates beside this file."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from evaluation.evaluation_settings import MeasurementSettings
from evaluation.reports.text import ends, estimate, signed
from evaluation.scoring.methods import name_of
from evaluation.statistics.intervals import FEW_BELOW, POINTS_ONLY_BELOW

UNDERTRAINED = 0.5  # a model is undertrained if it is fewer nats below a unigram model
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"signed": signed, "ends": ends, "estimate": estimate, "name": name_of}
_TEMPLATES.tests["finite"] = math.isfinite
_TEMPLATES.globals |= {
    "points_only_below": POINTS_ONLY_BELOW,
    "few_below": FEW_BELOW,
    "undertrained": UNDERTRAINED,
}


def sentences(template: str, **values: object) -> list[str]:
    """The paragraphs of `templates/{template}.txt.j2`, filled with `values`, white space
    collapsed."""
    text = _TEMPLATES.get_template(f"{template}.txt.j2").render(values)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def caveats(
    settings: MeasurementSettings,
    units: int,
    unit_kind: str,
    missing: Mapping[tuple[str, int], str],
    *,
    unchecked: str = "",
    learned: float | None = None,
    precision: Mapping[tuple, float] | None = None,
    notes: Sequence[str] = (),
) -> list[str]:
    """What limits the numbers of an evaluation.

    Args:
        missing: cells (method, length) without numbers, and why.
        unchecked: text that was not searched for passages of the training text, as a sentence.
        learned: nats by which the model is better than a unigram model.
        precision: mean bfloat16 − float32 of cells.
    """
    by_reason: dict[str, dict[str, list[int]]] = {}
    for (method, length), reason in missing.items():
        by_reason.setdefault(reason, {}).setdefault(method, []).append(length)
    return sentences(
        "caveats",
        settings=settings,
        units=units,
        unit_kind=unit_kind,
        missing=by_reason,
        unchecked=unchecked,
        learned=learned,
        precision=precision,
        notes=notes,
    )
