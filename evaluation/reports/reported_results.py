"""What a report is made from: the long table of one evaluation and the facts about it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from evaluation.reports.document import Cell, ReportTable, pivot
from evaluation.reports.text import counted, dtype_note, listed
from evaluation.results_table import ResultRow, ResultsTable, number
from evaluation.scoring.methods import name_of

NAMED = 6  # variants of one outcome that a sentence names


@dataclass(kw_only=True)
class ReportedResults:
    """The results of one evaluation of a run under several methods, of several runs, or of the
    schemes of a study.

    Attributes:
        title: of sections and figures: the run, or the name of a study's evaluation.
        variants: in their order, with their columns in results.csv: method, run or scheme.
        noun: what a variant is.
        facts: results.json of the evaluation without its summary, or of the first one of a study.
        seeds: number of training seeds of each variant; empty for an evaluation of runs.
        place: columns of results.csv: the evaluation and the group of cells of a study.
    """

    title: str
    variants: dict[str, dict[str, str]]
    noun: str = "method"
    facts: Mapping
    table: ResultsTable = field(default_factory=ResultsTable)
    seeds: dict[str, int] = field(default_factory=dict)
    place: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.variants)

    @property
    def trained_length(self) -> int:
        return self.facts["trained_length"]

    @property
    def subtitle(self) -> str:
        """Of figures of evaluations other than the loss by length."""
        count = self.title
        if items := self.facts.get("items"):
            count = f"{self.title}: {counted(items, 'item')} per length"
        elif documents := self.facts.get("documents"):
            count = f"{self.title}: {counted(documents, 'document')}"
        return count + dtype_note(self.facts.get("dtype", "float32"))


def method_variants(methods: Iterable[str]) -> dict[str, dict[str, str]]:
    return {name_of(method): {"method": method} for method in methods}


def melted(cells: Iterable[Mapping], metrics: Iterable[str]) -> Iterator[ResultRow]:
    """The rows of cells of results.json: one for each metric of a cell that has a number, with its
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


def metrics_table(
    r: ReportedResults,
    title: str,
    headings: Mapping[str, str],
    write: Callable[[ResultRow], Cell],
    index: Mapping[str, Callable[[ResultRow], str]],
) -> ReportTable:
    """A row for each variant and `index`, a column for each metric."""
    rows = [row for metric in headings for row in r.table.select(metric, where=None)]
    rows = [row for row in rows if not row.where.startswith("layer")]
    rows.sort(key=lambda row: (r.names.index(row.variant), row.length or 0))
    index = {r.noun: lambda row: row.variant, **index}
    columns = attrgetter("metric")
    return pivot(title, rows, write, index=index, columns=columns, headings=headings)


def seed_counts(results: ReportedResults, noun: str) -> str:
    """`3 seeds`, or `1 to 3 seeds` if the variants differ."""
    seeds = sorted(set(results.seeds.values()))
    most = counted(seeds[-1], noun)
    return f"{seeds[0]} to {most}" if len(seeds) > 1 else most


def named(r: ReportedResults, names: Sequence[str]) -> str:
    return listed(names) if len(names) <= NAMED else f"{len(names)} {r.noun}s"


def by_sign(r: ReportedResults, rows: Sequence[ResultRow], positive: str, negative: str) -> str:
    """`positive for a; negative for b and c; not significant for d`."""
    ordered = sorted(rows, key=lambda row: -abs(row.value))
    groups = {
        positive: [row.variant for row in ordered if row.low > 0],
        negative: [row.variant for row in ordered if row.high < 0],
        "not significant": [row.variant for row in ordered if row.low <= 0 <= row.high],
    }
    return "; ".join(f"{label} for {named(r, names)}" for label, names in groups.items() if names)
