"""The report of one evaluation of any kind: a results table, a record, sentences, tables and
figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from data.files import write_text
from evaluation.reports.charts import save
from evaluation.reports.document import (
    ReportDocument,
    ReportFigure,
    ReportSection,
    ReportTable,
)
from evaluation.reports.results_table import write_clean_json, write_table

DOWNLOADS = (
    ("results.csv", "all numbers"),
    ("results.json", "all numbers, settings and provenance"),
)


@dataclass
class EvaluationReport:
    """What an evaluation found.

    Attributes:
        name: of the results folder, unless the settings name one.
        rows: results.csv, one row for each number or cell, with equal keys.
        record: results.json, besides the summary.
        summary: what was found, in sentences; the first one is the verdict.
        caveats: what limits the numbers.
        figures: by file name.
        more_tables, more_records: further files (`items.csv`, `targets.json`) and what they hold.
    """

    name: str
    title: str
    rows: Sequence[dict]
    record: dict
    summary: list[str]
    tables: list[ReportTable]
    figures: dict[str, Figure]
    caveats: list[str] = field(default_factory=list)
    more_tables: dict[str, Sequence[dict]] = field(default_factory=dict)
    more_records: dict[str, dict] = field(default_factory=dict)

    def write(self, folder: Path) -> list[Path]:
        """Write tables, records, figures, summary.txt, report.md and report.html into `folder`;
        returns the files that a user reads first: the report, the figures, the numbers."""
        for name, rows in {"results.csv": self.rows, **self.more_tables}.items():
            write_table(folder / name, rows)
        summary = [*self.summary, *self.caveats]
        record = {"format": 1, "summary": summary, **self.record}
        for name, content in {"results.json": record, **self.more_records}.items():
            write_clean_json(folder / name, content)
        write_text(folder / "summary.txt", "\n".join(summary) + "\n")
        drawn = [save(figure, folder, name) for name, figure in self.figures.items()]
        document = self.document(drawn)
        write_text(folder / "report.html", document.html())
        write_text(folder / "report.md", document.markdown())
        return [folder / "report.html", *drawn, folder / "results.csv", folder / "results.json"]

    def document(self, figures: Sequence[Path] = ()) -> ReportDocument:
        """The report with figures that were written to these files."""
        blocks = [
            *self.tables,
            *(ReportFigure(file, self.title, self.title, link=file.name) for file in figures),
        ]
        first, *rest = self.summary
        notes = [*self.caveats, *rest]
        sections = [ReportSection("Results", blocks), ReportSection("Notes", notes)]
        return ReportDocument(self.title, "", [first], sections, DOWNLOADS)
