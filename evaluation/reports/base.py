"""The interface of every report: tidy rows on disk, figures, sentences and tables; and how numbers print."""

import csv
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from data.files import write_text
from evaluation.statistics.intervals import MeanInterval, interval, unit_means

Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows


class Report(ABC):
    """The results of one evaluation. `rows` is the long table that results.csv holds."""

    name: str  # of the results folder, unless the settings name one

    @abstractmethod
    def rows(self) -> list[dict]:
        """One flat record for each cell (and measure), with equal keys."""

    @abstractmethod
    def document(self) -> dict:
        """The content of results.json, without the summary."""

    @abstractmethod
    def summary(self) -> list[str]:
        """What was measured, in sentences."""

    @abstractmethod
    def tables(self) -> list[Table]:
        """Tables for a terminal."""

    @abstractmethod
    def draw(self, folder: Path) -> list[Path]:
        """Write the figures into `folder`; returns the PNG files."""

    def headlines(self) -> list[str]:
        """What is printed above the tables: by default the whole summary."""
        return self.summary()

    def footnotes(self, verbose: bool = False) -> list[str]:
        """What is printed below the tables."""
        return []

    def write(self, folder: Path) -> list[Path]:
        """Write results.csv, results.json and summary.txt into `folder`; returns the first two."""
        summary = self.summary()
        write_table(folder / "results.csv", self.rows())
        write_clean_json(
            folder / "results.json", {"format": 1, "summary": summary, **self.document()}
        )
        write_text(folder / "summary.txt", "\n".join(summary) + "\n")
        return [folder / "results.csv", folder / "results.json"]


def basis(result) -> dict:
    """The settings and hashes that the numbers of a `result` depend on, for every kind of evaluation."""
    settings = result.settings
    subject = result.subject
    return {
        "protocol": settings.protocol,
        "trained_length": subject.trained_length,
        "confidence": settings.confidence,
        "checkpoint": subject.name,
        "checkpoint_step": subject.step,
        "checkpoint_hash": subject.checkpoint_hash,
        "dtype": settings.dtype,
        "seed": settings.seed,
    }


def provenance(result) -> dict:
    """Command, settings and methods of a `result`, for results.json."""
    return {
        **{
            key: result.facts[key]
            for key in ("command", "changed", "finished")
            if key in result.facts
        },
        "settings": result.settings.model_dump(mode="json"),
        "methods": {
            method.label: {
                "overrides": list(method.overrides),
                "position": result.schemes[method.label],
            }
            for method in result.methods
        },
    }


def dtype_note(settings) -> str:
    """`, bfloat16` for titles of results that were not measured in float32, else ''."""
    return "" if settings.dtype == "float32" else f", {settings.dtype}"


def write_table(path: Path, rows: Sequence[dict]) -> None:
    """Write records with equal keys as CSV."""
    text = io.StringIO(newline="")
    names = list(rows[0]) if rows else ["method"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> str:
    """A Markdown table; columns after the first `texts` are aligned as numbers."""
    rule = ["---"] * texts + ["---:"] * (len(columns) - texts)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (columns, rule, *rows))


def write_clean_json(path: Path, value) -> None:
    """Write JSON with null for NaN and infinity."""
    write_text(path, json.dumps(_clean(value), indent=1) + "\n")


def _clean(value):
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {key: _clean(one) for key, one in value.items()}
    return [_clean(one) for one in value] if isinstance(value, list) else value


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinity, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def rounded(value: float) -> float | None:
    """The value with six significant digits; None for NaN and infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


NO_ENDS = {"low": None, "high": None}


def over_units(result, values) -> dict:
    """Mean and interval over units of the finite values, one value for each window or prompt."""
    there = np.isfinite(values)
    if not there.any():
        return {"value": None, **NO_ENDS}
    means = unit_means(values[there], result.unit[there])
    found = interval(means, alpha=1 - result.settings.confidence, resamples=0)
    return rounded_record({"value": found.estimate, "low": found.low, "high": found.high})


def rounded_record(record: dict) -> dict:
    return {
        key: rounded(value) if isinstance(value, float) else value for key, value in record.items()
    }


def ends_of(name: str, one: MeanInterval | None) -> dict[str, float | None]:
    """`{name}_low` and `{name}_high` of an interval; None for ends that do not exist."""
    low, high = (None, None) if one is None else (finite(one.low), finite(one.high))
    return {f"{name}_low": low, f"{name}_high": high}


def signed(value: float) -> str:
    """A difference in nats with its sign and three decimals."""
    return f"{round(value, 3) + 0.0:+.3f}"  # + 0.0: no minus sign before a zero


def ends(interval: MeanInterval) -> str:
    """`[low, high]`, or '' for an interval without ends."""
    return "" if math.isnan(interval.low) else f"[{signed(interval.low)}, {signed(interval.high)}]"


def estimate(interval: MeanInterval) -> str:
    """`+0.123 [+0.100, +0.146]`, or the estimate alone for an interval without ends."""
    return f"{signed(interval.estimate)} {ends(interval)}".rstrip()
