"""The report of one evaluation of any kind: its table of results and its record, which are written
as results.csv and results.json, and the sentences, tables and figures made from them."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from data.files import write_text
from data.preparation.summary import FEW_BELOW, POINTS_ONLY_BELOW
from evaluation.methods import name_of
from evaluation.reports.document import (
    Cell,
    ReportTable,
    counted,
    dtype_note,
    listed,
    markdown,
    page,
    picture,
    pivot,
    plain_text,
)
from evaluation.reports.figures import save
from evaluation.scoring.cells import Measurement
from evaluation.statistics.results_table import ResultRow, number, results_table, select, select_one

NAMED = 6  # maximum number of variants that a sentence names; more are counted
# Entries of results.json that results.csv repeats in each row.
RECORD_COLUMNS = ("protocol", "trained_length", "bos", "dtype", "corpus", "corpus_hash")
RECORD_COLUMNS += ("tokenizer_hash", "targets_hash", "items_hash", "checkpoint_hash")
RECORD_COLUMNS += ("targets", "documents", "unit")
DOWNLOADS = {
    "results.csv": "all numbers",
    "results.json": "settings, provenance and numbers by unit",
}


@dataclass(kw_only=True)
class ReportedResults:
    """The results of one evaluation of a run under several methods, of several runs, or of the
    schemes of a study.

    Attributes:
        title: title of sections and figures: the run, or the name of a study's evaluation.
        variants: variants in their order, with their columns in results.csv (method, run or
            scheme).
        noun: the word for one variant in sentences: method, run or scheme.
        record: results.json of the evaluation without its summary; for a study, of its first
            result.
        seeds: number of training seeds of each variant; empty for an evaluation of runs.
        study_columns: further columns of results.csv: the evaluation and the group of cells of a
            study.
    """

    title: str
    variants: dict[str, dict[str, str]]
    noun: str = "method"
    record: Mapping
    table: pd.DataFrame = field(default_factory=results_table)
    seeds: dict[str, int] = field(default_factory=dict)
    study_columns: dict[str, str] = field(default_factory=dict)

    def rows(self, metric: str, variant: str | None = None, **where: str | None) -> list[ResultRow]:
        """The rows of a metric, as `select` returns them."""
        return select(self.table, metric, variant, **where)

    def value(self, metric: str, variant: str, length: int | None = None) -> float | None:
        """The value over all seeds; None if it is missing."""
        row = select_one(self.table, metric, variant, length)
        return None if row is None else row.value

    def lengths_of(self, metric: str) -> list[int]:
        return sorted({row.inputs for row in self.rows(metric)})

    @property
    def names(self) -> list[str]:
        return list(self.variants)

    @property
    def trained_length(self) -> int:
        return self.record["trained_length"]

    @property
    def subtitle(self) -> str:
        """The subtitle of figures of all evaluations except the loss by length."""
        count = self.title
        if items := self.record.get("items"):
            count = f"{self.title}: {counted(items, 'item')} per length"
        elif documents := self.record.get("documents"):
            count = f"{self.title}: {counted(documents, 'document')}"
        return count + dtype_note(self.record.get("dtype", "float32"))

    def seed_counts(self, noun: str) -> str:
        """`3 seeds`, or `1 to 3 seeds` if the variants differ."""
        seeds = sorted(set(self.seeds.values()))
        most = counted(seeds[-1], noun)
        return f"{seeds[0]} to {most}" if len(seeds) > 1 else most

    def named(self, names: Sequence[str]) -> str:
        return listed(names) if len(names) <= NAMED else f"{len(names)} {self.noun}s"

    def by_sign(self, rows: Sequence[ResultRow], positive: str, negative: str) -> str:
        """`positive for a; negative for b and c; not significant for d`."""
        ordered = sorted(rows, key=lambda row: -abs(row.value))
        groups = {
            positive: [row.variant for row in ordered if row.low > 0],
            negative: [row.variant for row in ordered if row.high < 0],
            "not significant": [row.variant for row in ordered if row.low <= 0 <= row.high],
        }
        parts = [f"{label} for {self.named(names)}" for label, names in groups.items() if names]
        return "; ".join(parts)


def method_variants(methods: Iterable[str]) -> dict[str, dict[str, str]]:
    return {name_of(method): {"method": method} for method in methods}


def melted(cells: Iterable[Mapping], metrics: Iterable[str]) -> Iterator[ResultRow]:
    """The rows of cells of results.json: one for each metric with a number, with its ends
    `metric_low` and `metric_high`."""
    for cell in cells:
        for metric in metrics:
            if cell.get(metric) is not None:
                yield ResultRow(
                    name_of(cell["method"]),
                    metric,
                    cell[metric],
                    cell["length"],
                    low=number(cell.get(f"{metric}_low")),
                    high=number(cell.get(f"{metric}_high")),
                )


# heading and format of a metric, and more
Columns = Mapping[str, tuple[str, str | Callable[[ResultRow], Cell], *tuple[str, ...]]]


def metrics_table(
    r: ReportedResults,
    title: str,
    columns: Columns,
    index: Mapping[str, Callable[[ResultRow], str]],
) -> ReportTable:
    """A row for each variant and `index`, a column for each metric."""

    def write(row: ResultRow) -> Cell:
        _, form, *_ = columns[row.metric]
        return format(row.value, form) if isinstance(form, str) else form(row)

    rows = [row for metric in columns for row in r.rows(metric, where=None)]
    rows = [row for row in rows if not row.where.startswith("layer")]
    rows.sort(key=lambda row: (r.names.index(row.variant), row.length or 0))
    return pivot(
        title,
        rows,
        write,
        index={r.noun: lambda row: row.variant, **index},
        columns=attrgetter("metric"),
        headings={metric: heading for metric, (heading, *_) in columns.items()},
    )


def write_results(path: Path, results: Sequence[ReportedResults], **first: str) -> None:
    """Write results.csv: the rows of all tables, with the columns `first` before theirs."""
    records = [
        {
            **first,
            **r.study_columns,
            "variant": row.variant,
            **r.variants[row.variant],
            **row._asdict(),
            **{key: r.record.get(key) for key in RECORD_COLUMNS},
        }
        for r in results
        for row in map(ResultRow._make, r.table.itertuples(index=False))
    ]
    write_table(path, records)


def write_table(path: Path, rows: Sequence[Mapping] | pd.DataFrame) -> None:
    """Write a table as CSV; None and NaN are empty. Integers stay integers in columns with empty
    cells."""
    if not isinstance(rows, pd.DataFrame):
        rows = pd.DataFrame(list(rows), dtype=object)
    write_text(path, rows.to_csv(index=False, lineterminator="\n"))


def write_clean_json(path: Path, value) -> None:
    """Write JSON with null for NaN and infinity."""
    write_text(path, json.dumps(clean(value), indent=1) + "\n")


def clean(value: Any, digits: int | None = None) -> Any:
    """A value for JSON: None for NaN and infinity; floats are rounded to `digits` significant
    digits."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: clean(item, digits) for key, item in value.items()}
    return [clean(item, digits) for item in value] if isinstance(value, list) else value


@dataclass(kw_only=True)
class EvaluationReport:
    """The report of an evaluation.

    Attributes:
        name: name of the results folder, unless the settings name one.
        results: the long table, which becomes results.csv, and the content of results.json.
        verdict: the main finding in one sentence.
        details: further sentences.
        caveats: limitations of the numbers, as sentences.
        tables: tables that a reader needs first; `more_tables`: the other tables.
        draw: returns the figures by file name.
        more_records: contents of further JSON files, by name.
    """

    name: str
    title: str
    results: ReportedResults
    verdict: str = ""
    details: list[str] = field(default_factory=list)
    caveats: Sequence[str] = ()
    tables: Sequence[ReportTable] = ()
    more_tables: Sequence[ReportTable] = ()
    draw: Callable[[], dict[str, Figure]] = dict
    more_records: dict[str, dict] = field(default_factory=dict)

    @property
    def summary(self) -> list[str]:
        return [line for line in (self.verdict, *self.details, *self.caveats) if line]

    @cached_property
    def figures(self) -> dict[str, Figure]:
        return self.draw()

    def write_numbers(self, folder: Path) -> list[Path]:
        """Write tables, records and summary.txt into `folder`; returns results.csv and .json."""
        write_results(folder / "results.csv", [self.results])
        record = {"format": 1, "summary": self.summary, **self.results.record}
        for name, content in {"results.json": record, **self.more_records}.items():
            write_clean_json(folder / name, content)
        write_text(folder / "summary.txt", "\n".join(self.summary) + "\n")
        return [folder / "results.csv", folder / "results.json"]

    def write(self, folder: Path) -> list[Path]:
        """Write the numbers, figures, report.md and report.html into `folder`; returns the files
        that a user reads first: the report, the figures, the numbers."""
        numbers = self.write_numbers(folder)
        charts = []
        for name, figure in self.figures.items():
            caption = name.replace("_", " ").capitalize()
            charts.append(Chart(name, figure, caption, f"{self.title}: {caption}"))
        sections: dict[str, Sequence[Block]] = {
            "Results": [*self.tables, *charts, *self.more_tables],
            "Notes": [plain_text(line) for line in (*self.caveats, *self.details)],
        }
        pages, drawn = write_pages(folder, self.title, [self.verdict], sections, DOWNLOADS)
        return [pages[0], *drawn, *numbers]


class Chart(NamedTuple):
    """A figure of a report. `file`: its path without suffix, relative to the report; `alt`: text
    for readers who cannot see it."""

    file: str
    figure: Figure
    caption: str
    alt: str


Block = str | ReportTable | Chart  # Markdown, a table or a figure of a section


def write_pages(
    folder: Path,
    title: str,
    lead: Sequence[str],
    sections: Mapping[str, Sequence[Block]],
    downloads: Mapping[str, str],
) -> tuple[list[Path], list[Path]]:
    """Write report.html and report.md with their figures; returns the pages and the figures."""
    drawn = []
    blocks: dict[str, list[str | ReportTable]] = {heading: [] for heading in sections}
    for heading, own in sections.items():
        for block in own:
            if isinstance(block, Chart):
                file = folder / block.file
                drawn.append(save(block.figure, file.parent, file.name))
                block = picture(f"{block.file}.png", block.caption, block.alt)
            blocks[heading].append(block)
    text = markdown(title, lead, blocks, downloads)
    write_text(folder / "report.html", page(text, folder))
    write_text(folder / "report.md", text)
    return [folder / "report.html", folder / "report.md"], drawn


def caveats(
    units: int,
    unit_kind: str,
    runs: Mapping[str, Measurement],
    notes: Sequence[str] = (),
) -> list[str]:
    """Sentences about limitations. `runs`: the measurements by name, '' for a single run."""
    lines = []
    few = f"Only {counted(units, unit_kind)}"
    if units < POINTS_ONLY_BELOW:
        lines.append(f"{few}: point estimates, as intervals require {POINTS_ONLY_BELOW}.")
    elif units < FEW_BELOW:
        lines.append(f"{few}: interpret the intervals with caution.")
    lines += notes
    missing: dict[str, dict[str, list[str]]] = {}  # reason -> variant -> lengths
    for run, measurement in runs.items():
        for (method, length), reason in (measurement.absent | measurement.failed).items():
            name = ", ".join(filter(None, (run, name_of(method))))
            missing.setdefault(reason, {}).setdefault(name, []).append(f"{length:,}")
    for reason, variants in missing.items():
        cells = [f"{name} at {', '.join(lengths)}" for name, lengths in variants.items()]
        lines.append(f"Not measured: {'; '.join(cells)}: {reason}.")
    errors = []
    remarks: list[str] = []
    for measurement in runs.values():
        errors += map(abs, measurement.rounding_error.values())
        remarks += measurement.notes
    dtype = measurement.settings.dtype
    if dtype != "float32":
        off = f"; mean NLL within {max(errors):.4f} nats of float32 on a sample" if errors else ""
        lines.append(f"Measured in {dtype}{off}.")
    return lines + list(dict.fromkeys(remarks))


def basis(measurement: Measurement) -> dict:
    """The settings, methods and hashes that determine the numbers of a `measurement`, and the cells
    without numbers."""
    facts = ("command", "changed", "finished", "tokenizer_hash", "corpus_hash", "corpus")
    return {
        "protocol": measurement.settings.protocol,
        "trained_length": measurement.subject.trained_length,
        "confidence": measurement.settings.confidence,
        "checkpoint": measurement.subject.name,
        "checkpoint_step": measurement.subject.step,
        "checkpoint_hash": measurement.subject.checkpoint_hash,
        "dtype": measurement.settings.dtype,
        "seed": measurement.settings.seed,
        **{key: measurement.facts[key] for key in facts if key in measurement.facts},
        "settings": measurement.settings.model_dump(mode="json"),
        "methods": {
            method.label: {
                "overrides": list(method.overrides),
                "position": measurement.schemes[method.label],
            }
            for method in measurement.methods
        },
        "not_measured": [
            {"method": method, "length": length, "reason": reason}
            for (method, length), reason in (measurement.absent | measurement.failed).items()
        ],
    }


def report_of(
    measurement: Measurement,
    record: dict,
    rows: Iterable[ResultRow],
    name: str,
    title: str,
    details: list[str],
) -> EvaluationReport:
    """The report of a run under its methods, without verdict, tables and figures.

    Args:
        record: the content of results.json; has `unit_count` independent units of the kind `unit`.
        rows: rows of the table of results.
    """
    r = ReportedResults(
        title=measurement.subject.name,
        variants=method_variants(method.label for method in measurement.methods),
        record=record,
        table=results_table(rows),
    )
    return EvaluationReport(
        name=name,
        title=f"{title} {r.title}",
        results=r,
        details=details,
        caveats=caveats(record["unit_count"], record["unit"], {"": measurement}),
    )
