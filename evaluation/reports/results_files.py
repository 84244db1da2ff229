"""Files of results: results.csv, which is the long table with the facts about the evaluation in
each row, and JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from data.files import write_text
from evaluation.reports.reported_results import ReportedResults

# Facts about an evaluation that results.csv repeats in each row.
FACTS = ("protocol", "trained_length", "bos", "dtype", "corpus", "corpus_hash", "tokenizer_hash")
FACTS += ("targets_hash", "items_hash", "checkpoint_hash", "targets", "documents", "unit")


def write_results(path: Path, results: Sequence[ReportedResults], **first: str) -> None:
    """results.csv: the rows of all tables, after columns that are `first`."""
    records = [
        {
            **first,
            **r.place,
            "variant": row.variant,
            **r.variants[row.variant],
            **row._asdict(),
            **{key: r.facts.get(key) for key in FACTS},
        }
        for r in results
        for row in r.table.rows.values()
    ]
    write_table(path, records)


def write_table(path: Path, rows: Sequence[Mapping] | pd.DataFrame) -> None:
    """Write a table as CSV; None and NaN are empty. Whole numbers stay whole where other rows have
    none."""
    if not isinstance(rows, pd.DataFrame):
        rows = pd.DataFrame(list(rows), dtype=object)
    write_text(path, rows.to_csv(index=False, lineterminator="\n"))


def write_clean_json(path: Path, value) -> None:
    """Write JSON with null for NaN and infinity."""
    write_text(path, json.dumps(clean(value), indent=1) + "\n")


def clean(value, digits: int | None = None):
    """A value for JSON: None for NaN and infinity, and floats of so many significant digits."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: clean(item, digits) for key, item in value.items()}
    return [clean(item, digits) for item in value] if isinstance(value, list) else value
