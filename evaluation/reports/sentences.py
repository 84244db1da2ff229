"""The summaries of reports, from the templates beside this file."""

import math
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from evaluation.reports.text import ends, estimate, signed
from evaluation.scoring.methods import name_of
from evaluation.statistics.intervals import FEW_BELOW, POINTS_ONLY_BELOW

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"signed": signed, "ends": ends, "estimate": estimate, "name": name_of}
_TEMPLATES.tests["finite"] = math.isfinite
_TEMPLATES.globals |= {"points_only_below": POINTS_ONLY_BELOW, "few_below": FEW_BELOW}


def sentences(template: str, **values: object) -> list[str]:
    """The paragraphs of `templates/{template}.txt.j2`, filled with `values`, white space
    collapsed."""
    text = _TEMPLATES.get_template(f"{template}.txt.j2").render(values)
    return [" ".join(one.split()) for one in re.split(r"\n\s*\n", text) if one.strip()]
