"""Write the tables, the CSV and the figures of docs/results/smollm2.md from results of evaluate.py.

    python scripts/docs/smollm2.py RUN/evaluation/long_novels RUN/evaluation/novels

Each folder fills the table of its name: a row for each method, a column for each length, NLL in
nats per token. A folder without a place in the document is an error; tables without a folder do not
change. Of the figures smollm2_NAME.png (loss by length) and smollm2_NAME_gain.png (net gain at the longest
length), those that the document shows are written.
"""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from data.files import write_text
from errors import EvaluationError
from evaluation.reports.charts import LineStyle, dots_panel
from evaluation.reports.figures import INK, FigureText, panels, save
from evaluation.reports.results_files import markdown_table
from evaluation.reports.text import signed
from evaluation.results_table import ResultRow, number
from evaluation.scoring.methods import TRAINED, TRUNCATE, name_of
from settings.script import Parser, run_main

DOCS = Path(__file__).resolve().parents[2] / "docs"
DOCUMENT = DOCS / "results" / "smollm2.md"
CSV = DOCS / "results" / "smollm2.csv"
FIGURES = DOCS / "figures"
COLUMNS = [
    "method",
    "length",
    "nll",
    "gain",
    "gain_low",
    "gain_high",
    "verdict",
    "documents",
    "targets",
]


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        help="folders of results of evaluate.py",
    )
    text = DOCUMENT.read_text(encoding="utf-8")
    tables = []
    for folder in parser.parse_args().folders:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        text = filled(
            text,
            folder.name,
            described(results) + "\n\n" + table(results),
        )
        facts = {key: results[key] for key in ("documents", "targets")}
        rows = pd.DataFrame([cell | facts for cell in results["cells"]])
        tables.append(rows[COLUMNS].assign(evaluation=folder.name))
        name = f"smollm2_{folder.name}"
        if f"{name}.png" in text:
            shutil.copy(folder / "nll_by_length.png", FIGURES / f"{name}.png")
        if f"{name}_gain.png" in text:
            save(gain_figure(results), FIGURES, f"{name}_gain").with_suffix(".svg").unlink()
    others = [] if not CSV.exists() else [pd.read_csv(CSV)]
    names = {name for own in tables for name in own.evaluation}
    kept = [other[~other.evaluation.isin(names)] for other in others]
    write_text(CSV, pd.concat([*kept, *tables]).to_csv(index=False, float_format="%.6g"))
    write_text(DOCUMENT, text)
    return 0


def filled(text: str, name: str, content: str) -> str:
    """The document with this content between the marks of `name`."""
    start = f"<!-- results {name} -->"
    end = f"<!-- end of results {name} -->"
    if start not in text or end not in text:
        raise EvaluationError(
            f"{DOCUMENT.name} has no results named {name}: rename the folder with folder="
        )
    return re.sub(
        f"{start}.*{end}",
        lambda _: f"{start}\n{content}\n{end}",
        text,
        flags=re.DOTALL,
    )


def described(results: dict) -> str:
    """Counts of documents and targets."""
    count = results["documents"]
    units = results["units"]["names"]
    kind = results["unit"]
    inside = "" if len(units) < 6 else f" Intervals are over {len(units)} {kind}s."
    return f"{count} document{'s' * (count > 1)}, {results['targets']:,} targets.{inside}"


def best_first(results: dict) -> list[dict]:
    """The cells of the longest length without truncation."""
    longest = results["lengths"][-1]
    cells = [
        cell
        for cell in results["cells"]
        if cell["length"] == longest and cell["method"] != TRUNCATE
    ]
    return sorted(cells, key=lambda cell: cell["nll"])


def gain_figure(results: dict) -> Figure:
    """Net gain over truncated context at the longest length, with intervals."""
    rows = [
        ResultRow(
            name_of(cell["method"]),
            "gain",
            cell["gain"],
            low=number(cell["gain_low"]),
            high=number(cell["gain_high"]),
        )
        for cell in best_first(results)
    ]
    lengths = f"{results['lengths'][-1]:,} tokens of context against the last {results['trained_length']:,}"
    text = FigureText(lengths, described(results))
    styles = {row.variant: LineStyle(INK, "o") for row in rows}
    panel = dots_panel(
        rows, styles, x="net gain, nats per token (right: better)", band=results["tolerance"]
    )
    return panels([panel], text)


def table(results: dict) -> str:
    """NLL by method and length, best at the longest length first, and the net gain over truncation
    there."""
    lengths = results["lengths"]
    cells = {(cell["method"], cell["length"]): cell for cell in results["cells"]}
    longest = lengths[-1]
    labels = [cell["method"] for cell in best_first(results)]
    base = cells[TRAINED, results["trained_length"]]["nll"]
    truncated = f"context truncated to {results['trained_length']:,}"
    rows = [[truncated, *[""] * (len(lengths) - 1), f"{base:.4f}", ""]]
    for label in labels:
        last = cells[label, longest]
        gain = signed(last["gain"])
        if last["gain_low"] is not None:
            gain += f" [{signed(last['gain_low'])}, {signed(last['gain_high'])}]"
        rows.append(
            [name_of(label), *(f"{cells[label, length]['nll']:.4f}" for length in lengths), gain]
        )
    columns = ["method", *(f"{length:,}" for length in lengths), f"net gain at {longest:,}"]
    return markdown_table(columns, rows)


if __name__ == "__main__":
    run_main(main)
