"""The report of one evaluation of any kind: its long table, a record, sentences, tables and
figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from matplotlib.figure import Figure

from data.files import write_text
from data.preparation.summary import FEW_BELOW, POINTS_ONLY_BELOW
from evaluation.reports.document import ReportTable, markdown, page, picture, plain_text
from evaluation.reports.figures import save
from evaluation.reports.reported_results import ReportedResults, method_variants
from evaluation.reports.results_files import write_clean_json, write_results
from evaluation.reports.text import counted
from evaluation.results_table import ResultRow, ResultsTable
from evaluation.scoring.methods import name_of
from evaluation.scoring.session import MeasuredCells

DOWNLOADS = {
    "results.csv": "all numbers",
    "results.json": "settings, provenance and numbers by unit",
}


@dataclass(kw_only=True)
class EvaluationReport:
    """What an evaluation found.

    Attributes:
        name: of the results folder, unless the settings name one.
        results: the long table, which becomes results.csv, and the content of results.json.
        verdict: what was found, in one sentence.
        details: further sentences.
        caveats: what limits the numbers.
        tables: the first ones a reader needs; `more_tables`: the others.
        draw: draws the figures, by file name.
        more_records: further files and what they hold.
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
        record = {"format": 1, "summary": self.summary, **self.results.facts}
        for name, content in {"results.json": record, **self.more_records}.items():
            write_clean_json(folder / name, content)
        write_text(folder / "summary.txt", "\n".join(self.summary) + "\n")
        return [folder / "results.csv", folder / "results.json"]

    def write(self, folder: Path) -> list[Path]:
        """Write the numbers, figures, report.md and report.html into `folder`; returns the files
        that a user reads first: the report, the figures, the numbers."""
        numbers = self.write_numbers(folder)
        drawn = [save(figure, folder, name) for name, figure in self.figures.items()]
        captions = [file.stem.replace("_", " ").capitalize() for file in drawn]
        pictures = [
            picture(file.name, caption, f"{self.title}: {caption}")
            for file, caption in zip(drawn, captions, strict=True)
        ]
        sections = {
            "Results": [*self.tables, *pictures, *self.more_tables],
            "Notes": [plain_text(line) for line in (*self.caveats, *self.details)],
        }
        text = markdown(self.title, [self.verdict], sections, DOWNLOADS)
        write_text(folder / "report.html", page(text, folder))
        write_text(folder / "report.md", text)
        return [folder / "report.html", *drawn, *numbers]


def caveats(
    units: int,
    unit_kind: str,
    runs: Mapping[str, MeasuredCells],
    notes: Sequence[str] = (),
) -> list[str]:
    """Sentences; `runs`: the results by name, '' for a single one."""
    lines = []
    few = f"Only {counted(units, unit_kind)}"
    if units < POINTS_ONLY_BELOW:
        lines.append(f"{few}: point estimates, as intervals require {POINTS_ONLY_BELOW}.")
    elif units < FEW_BELOW:
        lines.append(f"{few}: interpret the intervals with caution.")
    lines += notes
    missing: dict[str, dict[str, list[str]]] = {}  # by reason and variant
    for run, result in runs.items():
        for (method, length), reason in (result.absent | result.failed).items():
            name = ", ".join(filter(None, (run, name_of(method))))
            missing.setdefault(reason, {}).setdefault(name, []).append(f"{length:,}")
    for reason, variants in missing.items():
        cells = [f"{name} at {', '.join(lengths)}" for name, lengths in variants.items()]
        lines.append(f"Not measured: {'; '.join(cells)}: {reason}.")
    errors = []
    remarks: list[str] = []
    for result in runs.values():
        errors += map(abs, result.precision.values())
        remarks += result.notes
    dtype = result.settings.dtype
    if dtype != "float32":
        off = f"; mean NLL within {max(errors):.4f} nats of float32 on a sample" if errors else ""
        lines.append(f"Measured in {dtype}{off}.")
    return lines + list(dict.fromkeys(remarks))


def basis(result: MeasuredCells) -> dict:
    """The settings, methods and hashes that the numbers of a `result` depend on, and the cells
    without numbers."""
    facts = ("command", "changed", "finished", "tokenizer_hash", "corpus_hash", "corpus")
    return {
        "protocol": result.settings.protocol,
        "trained_length": result.subject.trained_length,
        "confidence": result.settings.confidence,
        "checkpoint": result.subject.name,
        "checkpoint_step": result.subject.step,
        "checkpoint_hash": result.subject.checkpoint_hash,
        "dtype": result.settings.dtype,
        "seed": result.settings.seed,
        **{key: result.facts[key] for key in facts if key in result.facts},
        "settings": result.settings.model_dump(mode="json"),
        "methods": {
            method.label: {
                "overrides": list(method.overrides),
                "position": result.schemes[method.label],
            }
            for method in result.methods
        },
        "not_measured": [
            {"method": method, "length": length, "reason": reason}
            for (method, length), reason in (result.absent | result.failed).items()
        ],
    }


def report_of(
    result: MeasuredCells,
    record: dict,
    rows: Callable[[dict], Iterable[ResultRow]],
    name: str,
    title: str,
) -> EvaluationReport:
    """The report of a run under its methods, without sentences, tables and figures yet.

    Args:
        record: of `unit_count` independent units of the kind `unit`.
        rows: the long table of a record.
    """
    r = ReportedResults(
        title=result.subject.name,
        variants=method_variants(method.label for method in result.methods),
        facts=record,
        table=ResultsTable(rows(record)),
    )
    return EvaluationReport(
        name=name,
        title=f"{title} {r.title}",
        results=r,
        caveats=caveats(record["unit_count"], record["unit"], {"": result}),
    )
