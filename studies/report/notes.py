"""Texts of the report from templates/texts.yaml, filled with facts about a loss evaluation."""

from __future__ import annotations

from pathlib import Path

import yaml

from evaluation.reports.text import counted
from studies.results.loss_comparison import LossComparison

_FILE = Path(__file__).with_name("templates") / "texts.yaml"
TEXTS: dict[str, dict[str, str]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))


def note(name: str, table: LossComparison | None = None, **values: object) -> str:
    """A text of texts.yaml; `values` fill the names that `table` does not."""
    if table is not None:
        values |= {
            "l0": table.trained_length,
            "kind": table.losses.kind,
            "baseline": table.baseline,
            "family": table.family,
            "differences": table.difference_family,
            "tolerance": table.tolerance,
            "level": 100 * table.confidence,
        }
    return TEXTS["notes"][name].format(**values)


def seed_counts(table: LossComparison, noun: str) -> str:
    """`3 seeds`, or `1 to 3 seeds` if the variants differ."""
    seeds = sorted({table.seed_count(name) for name in table.names})
    most = counted(seeds[-1], noun)
    return f"{seeds[0]} to {most}" if len(seeds) > 1 else most
