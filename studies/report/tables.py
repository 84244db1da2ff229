"""The tables of a study's report: views of the results table and of the training runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from evaluation.reports.text import plain
from studies.report.document import (
    NONE,
    Cell,
    ReportTable,
    TableCell,
    counted,
    note,
    signed,
    with_ends,
)
from studies.report.figures import MEASURES
from studies.results.compare import SEEN, UNSEEN, StudyComparison
from studies.results.others import ABOVE_CHANCE
from studies.results.stored import Group, StoredStudy
from studies.results.table import ResultsTable, StudyResult

MARK = {
    "held": "✓ held",
    "broken": "✗ broken",
    "inconclusive": "? inconclusive",
    "points only": "· point",
}


# column, part of the cell, key, format
COSTS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("parameters", "training", "parameters", "{:,.0f}".format),
    ("tokens", "training", "tokens", "{:,.0f}".format),
    ("FLOPs per token", "training", "flops_per_token", "{:.3g}".format),
    ("training FLOPs", "training", "flops", "{:.3g}".format),
    ("last training loss", "training", "loss", "{:.3f}".format),
    ("tokens/s", "timing", "tokens_per_second", "{:,.0f}".format),
    ("seconds", "timing", "seconds", "{:,.0f}".format),
    ("peak memory, MiB", "timing", "peak_memory_bytes", lambda v: f"{v / 2**20:,.0f}"),
)


def _matrix(
    title: str,
    table: ResultsTable,
    metric: str,
    lengths: Iterable[int],
    cell: Callable[[StudyResult], Cell],
    note: str,
) -> ReportTable:
    """One metric: a row per variant and a column per length; a dash where there is no number."""
    lengths = list(lengths)
    rows = []
    names = (
        dict.fromkeys(row.variant for row in table.select(metric))
        if metric == "difference"
        else table.names
    )
    for name in names:
        found = [table.get(name, metric, length) for length in lengths]
        rows.append([name, *(NONE if row is None else cell(row) for row in found)])
    return ReportTable(title, ["scheme", *(f"{n:,}" for n in lengths)], rows, note)


def _toned(row: StudyResult | None, positive: str = "better", negative: str = "worse") -> Cell:
    """The interval, colored by its sign if it excludes zero."""
    if row is None:
        return NONE
    return TableCell(with_ends(row), positive if row.low > 0 else negative if row.high < 0 else "")


def overview(table: StudyComparison) -> ReportTable:
    """One row per variant: its starting point and what it reached."""
    l0 = table.trained_length
    unigram = table.losses.unigram
    columns = [
        "scheme",
        "seeds",
        f"NLL at {l0:,}",
        "below unigram",
        "bits per byte",
        "held to",
        "broken at",
    ]
    columns += ["longest length", "change at longest", "gain over truncation", "context reach"]
    rows: list[list[Cell]] = []
    for name in table.names:
        base = table.value(name, "nll_as_trained", l0) or 0.0
        last = table.last(name)
        bits = table.value(name, "bits_per_byte", l0)
        reach = table.value(name, "context_reach")
        held = table.value(name, "held_to")
        broken = table.value(name, "break_point")
        change = next((row for row in table.beyond(name) if row.length == last), None)
        none_reached = TableCell("not reached", "faint")
        rows.append(
            [
                name,
                str(table.seed_count(name)),
                plain(base),
                NONE if unigram is None else signed(unigram - base, 2),
                NONE if bits is None else plain(bits),
                TableCell(f"{held:,.0f}", "held") if held else NONE,
                TableCell(f"{broken:,.0f}", "broken") if broken else NONE,
                f"{last:,}" if last else NONE,
                with_ends(change) or NONE,
                _toned(table.get(name, "gain", last)) if change else NONE,
                NONE if not table.claims(name) else f"{reach:,.0f}" if reach else none_reached,
            ]
        )
    return ReportTable("Overview", columns, rows, note("overview", table))


def levels(table: StudyComparison) -> ReportTable:
    """NLL of every variant at every length."""
    losses = table.losses

    def cell(row: StudyResult) -> str:
        return f"{row.value:.3f}" + ("" if math.isnan(row.low) else f" ± {row.half:.3f}")

    found = _matrix("NLL at each length", table, "nll", losses.lengths, cell, note("levels", table))
    if losses.unigram is not None:
        level = [f"{losses.unigram:.3f}"] * len(losses.lengths)
        found.rows.append([TableCell(text, "faint") for text in ("unigram model", *level)])
    return found


def verdicts(table: StudyComparison) -> ReportTable:
    """The verdict and the change at every length beyond the trained length."""
    return _matrix(
        f"Change relative to the trained length {table.trained_length:,}, and the verdict",
        table,
        "delta",
        table.losses.longer,
        lambda row: TableCell(f"{MARK[row.verdict]} {with_ends(row)}", row.verdict.split()[0]),
        note("verdicts", table),
    )


def gains(table: StudyComparison) -> ReportTable:
    """Net gain over truncation at every length beyond the trained length."""
    return _matrix(
        "Net gain over truncation", table, "gain", table.losses.longer, _toned, note("gains", table)
    )


def steps(table: StudyComparison) -> ReportTable:
    """The gain of each step to the next length."""
    found = {
        (row.variant, row.length, *row.where): row for row in table.select("step_gain", where=None)
    }
    columns = list(dict.fromkeys((a, b) for _, a, b in found))
    rows = [
        [name, *(with_ends(found.get((name, a, b))) or NONE for a, b in columns)]
        for name in dict.fromkeys(name for name, _, _ in found)
    ]
    headings = ["scheme", *(f"{a:,} → {b:,}" for a, b in columns)]
    return ReportTable("Gain of each step to a longer context", headings, rows, note("steps"))


def differences(table: StudyComparison) -> ReportTable:
    """Every variant against the baseline at the primary lengths."""
    text = note("differences", table)
    if paired := sorted({row.variant for row in table.select("difference") if row.note}):
        text += f" Paired by seed, same checkpoints as {table.baseline}: {', '.join(paired)}."
    title = f"Difference from {table.baseline}"
    return _matrix(
        title, table, "difference", table.primary, lambda row: _toned(row, "worse", "better"), text
    )


def seen_units(table: StudyComparison) -> ReportTable:
    """The units outside and inside the training data separately."""
    losses = table.losses
    l0 = table.trained_length
    rows = []
    parts = ((UNSEEN, ~losses.seen, "not in"), (SEEN, losses.seen, "in"))
    for name in table.names:
        for where, chosen, inside in parts:
            trained = table.get(name, "nll_as_trained", l0, where)
            last = table.last(name)
            nll, gain = (table.get(name, metric, last, where) for metric in ("nll", "gain"))
            if trained and nll:
                units = [f"{chosen.sum()}", f"{losses.targets[chosen].sum():,}"]
                numbers = [f"{trained.value:.3f}", f"{last:,}", f"{nll.value:.3f}", with_ends(gain)]
                rows.append([name, f"{losses.kind}s {inside} the training data", *units, *numbers])
    columns = ["scheme", "part", f"{losses.kind}s", "targets", f"NLL at {l0:,}"]
    return ReportTable(
        f"{losses.kind.capitalize()}s inside and outside the training data",
        [*columns, "longest length", "NLL at longest", "gain over truncation"],
        rows,
        note("seen"),
        numbers=2,
    )


def percent(row: StudyResult) -> str:
    """`90% [80%, 97%]`; the interval is clipped to 0–100%."""
    ends = f" [{100 * max(row.low, 0.0):.0f}%, {100 * min(row.high, 1.0):.0f}%]"
    return f"{100 * row.value:.0f}%" + ("" if math.isnan(row.low) else ends)


def accuracy(table: ResultsTable) -> ReportTable:
    """Accuracy of a task at every length."""
    lengths = sorted({row.at for row in table.select("accuracy")})
    exact = [row for row in table.select("exact") if row.length == lengths[0]]
    text = (
        f"Chance: {100 * table.facts['chance']:.0f}%; shaded: significantly above. Generated exactly at "
        f"{lengths[0]:,}: {', '.join(f'{row.variant} {100 * row.value:.0f}%' for row in exact)}."
    )

    def cell(row: StudyResult) -> Cell:
        return TableCell(percent(row), "held" if row.verdict == ABOVE_CHANCE else "")

    return _matrix("Accuracy by length", table, "accuracy", lengths, cell, text)


def _change(rows: Sequence[StudyResult | None], write: Callable[[float], str]) -> str:
    """`2.00 → 4.00`, a dash for a missing number."""
    return " → ".join("—" if row is None else write(row.value) for row in rows)


def attention(table: ResultsTable) -> ReportTable:
    """Measures of attention at the trained length and at the longest."""
    ends = table.trained_length, max(row.at for row in table.rows.values() if row.length)
    rows = [
        [name, *(_change([table.get(name, m, n) for n in ends], "{:.3g}".format) for m in MEASURES)]
        for name in table.names
    ]
    title = f"Attention at {ends[0]:,} → {ends[1]:,} tokens"
    return ReportTable(title, ["scheme", *MEASURES.values()], rows, note("no_intervals"))


def generation(table: ResultsTable) -> ReportTable:
    """Repetition and NLL of generated text in the first and last range of positions."""
    rows = []
    for name in table.names:
        places = sorted(row.where for row in table.select("nll", name, where=None))
        for source in dict.fromkeys(
            row.where[0] for row in table.rows.values() if row.variant == name
        ):
            own = [place for place in places if place[0] == source]
            ends = own[0], own[-1]
            repeated, nll = (
                [table.get(name, m, None, at) for at in ends] for m in ("repeated_4", "nll")
            )
            positions = " → ".join(f"{start:,}–{stop:,}" for _, start, stop in ends)
            shares = _change(repeated, lambda value: f"{100 * value:.0f}%")
            rows.append([name, source, shares, _change(nll, "{:.2f}".format), positions])
    columns = ["scheme", "text", "repeated 4-grams", "NLL under the model", "positions"]
    text = f"{note('generation')} {note('no_intervals')}"
    return ReportTable(
        "Repetition and NLL of generated text by position", columns, rows, text, numbers=2
    )


def costs(study: StoredStudy, group: Group, table: StudyComparison | None) -> ReportTable:
    """Training cost and result of each scheme, mean over its seeds."""
    rows: list[list[Cell]] = []
    first = {variant.scheme: variant for variant in reversed(study.variants)}
    for scheme in dict.fromkeys(variant.scheme for variant in study.variants):
        name = first[scheme].name
        cells = [
            cell.record for cell in study.of(first[scheme], group) if cell.record.get("training")
        ]
        nll = table.value(name, "nll_as_trained", table.trained_length) if table else None
        row: list[Cell] = [scheme, NONE if nll is None else plain(nll)]
        for _, part, key, write in COSTS:
            values = [c[part][key] for c in cells if (c.get(part) or {}).get(key) is not None]
            row.append(write(sum(values) / len(values)) if values else NONE)
        rows += [row] if cells else []
    found = [(cell.record.get("timing") or {}).get("machine") for cell in study.cells]
    machines = "; ".join(dict.fromkeys(_machine(one) for one in found if one))
    text = "Means over seeds." + (f" Speed and memory on: {machines}." if machines else "")
    heading = f"NLL at {table.trained_length:,}" if table else "NLL"
    return ReportTable("Training cost", ["scheme", heading, *(c[0] for c in COSTS)], rows, text)


def _machine(about: dict[str, Any]) -> str:
    """`AMD EPYC, 1 thread` or `NVIDIA H200`."""
    gpus = about.get("gpus") or []
    threads = about.get("threads")
    if gpus:
        return ", ".join(str(one) for one in gpus)
    return str(about.get("processor", "unknown")) + (
        f", {counted(threads, 'thread')}" if threads else ""
    )


def basis(table: StudyComparison) -> ReportTable:
    """The data and settings of an evaluation."""
    losses = table.losses
    facts = table.facts
    documents = facts.get("documents")
    of = f" from {documents} documents" if documents and losses.kind != "document" else ""
    seeds = [f"{name}: {', '.join(by_seed)}" for name, by_seed in losses.reference.items()]
    more = (
        f" and {len(losses.units) - 24} more (see results.json)" if len(losses.units) > 24 else ""
    )
    rows = {
        "protocol": facts.get("protocol"),
        "lengths, tokens": ", ".join(f"{n:,}" for n in losses.lengths),
        "trained length": f"{losses.trained_length:,}",
        "targets": f"{int(losses.targets.sum()):,}",
        "units": f"{len(losses.units)} {losses.kind}s{of}",
        "names of the units": ", ".join(losses.units[:24]) + more,
        "BOS policy": facts.get("bos"),
        "corpus": facts.get("corpus", ""),
        "corpus hash": facts.get("corpus_hash", ""),
        "tokenizer hash": facts.get("tokenizer_hash", ""),
        "targets hash": facts.get("targets_hash", ""),
        "dtype": facts.get("dtype"),
        "evaluation seed": facts.get("seed"),
        "training seeds": "; ".join(seeds),
        "tolerance": f"{table.tolerance:g} nats",
        "confidence level": f"{100 * table.confidence:g}%",
        "families": f"verdicts: {table.family}; differences: {table.difference_family}",
    }
    texts: list[list[Cell]] = [[key, str(value)] for key, value in rows.items() if value != ""]
    return ReportTable(f"Data and settings of {losses.name}", ["", ""], texts, numbers=2)


def checkpoints(study: StoredStudy) -> ReportTable:
    """The training runs of the report."""
    rows: list[list[Cell]] = []
    for cell in study.cells:
        if run := cell.record.get("training"):
            values = (run.get(key) or "" for key in ("steps", "checkpoint_hash", "data_hash"))
            rows.append([cell.id, *(str(value)[:16] for value in values), run.get("run") or ""])
    return ReportTable(
        "Checkpoints",
        ["cell", "steps", "checkpoint", "data", "run"],
        rows,
        note("hashes"),
        numbers=5,
    )


def failures(study: StoredStudy) -> ReportTable:
    """Cells without results."""
    states = (
        (cell.id, cell.record["status"], cell.record.get("error")) for cell in study.unfinished
    )
    rows: list[list[Cell]] = [
        [id, TableCell(s, "broken"), error or "not run yet"] for id, s, error in states
    ]
    return ReportTable("Cells without results", ["cell", "status", "reason"], rows, numbers=3)


def excluded(tables: Sequence[StudyComparison]) -> ReportTable:
    """Lengths that could not be evaluated, and results that are not comparable."""
    rows: list[list[str]] = []
    for losses in (table.losses for table in tables):
        reasons: dict[tuple[str, str], list[int]] = {}
        for (name, length), reason in losses.missing.items():
            reasons.setdefault((name, reason), []).append(length)
        for (name, reason), lengths in reasons.items():
            rows.append([losses.name, name, ", ".join(f"{n:,}" for n in sorted(lengths)), reason])
        rows += [[losses.name, cell, "all", reason] for cell, reason in losses.excluded.items()]
    return ReportTable(
        "Excluded results", ["evaluation", "scheme", "lengths", "reason"], rows, numbers=4
    )
