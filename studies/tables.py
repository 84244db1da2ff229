"""The tables of a study's report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from studies.compare import Apart, Comparison, Line, Reading
from studies.document import Cell, Table, counted, plain, signed, with_ends
from studies.stored import Group, Study

NONE = Cell("—", "faint")
MARK = {"held": "✓ held", "broken": "✗ broken", "undecided": "? undecided", "points only": "· point"}


def overview(comparison: Comparison) -> Table:
    """One row a variant: what it reached, by how much, from where it started."""
    losses = comparison.losses
    l0 = losses.trained_length
    unigram = None if losses.unigram is None else float(losses.unigram.mean())
    columns = ["scheme", "seeds", f"NLL at {l0:,}", "below unigram", "bits per byte", "held to", "broken at"]
    columns += ["longest read", "change there", "gain over truncation", "context reach"]
    rows = []
    for line in comparison.lines:
        base, last = line.trained.estimate, line.last
        row: list[Cell | str] = [
            line.variant.name,
            str(line.trained.seeds[0]),
            plain(base),
            NONE if unigram is None else signed(unigram - base, 2),
            _bits(line.at(l0)),
            Cell(f"{line.held_to:,}", "held") if line.held_to else NONE,
            Cell(f"{line.break_point:,}", "broken") if line.break_point else NONE,
            f"{last.length:,}" if last else NONE,
            with_ends(last.delta) if last and last.delta and last.word else NONE,
            gain_cell(last) if last and last.word else NONE,
            _reach(line),
        ]
        rows.append(row)
    return Table(
        "Which scheme holds to which length",
        columns,
        rows,
        f"NLL in nats a token, as trained at {l0:,}, mean over {losses.kind}s and seeds. below unigram: by "
        "how much a "
        "unigram model is worse on the same tokens; near zero, a scheme has learned little. change: NLL "
        "there less "
        f"that as trained at {l0:,}, same targets, simultaneous over {comparison.family} comparisons. "
        "Context "
        f"reach: the length after which none longer is better by {comparison.tolerance:g} nats.",
    )


def _bits(reading: Reading | None) -> Cell | str:
    return NONE if reading is None or reading.bits_per_byte is None else plain(reading.bits_per_byte)


def _reach(line: Line) -> Cell | str:
    if not line.claims:
        return NONE
    return f"{line.reach:,}" if line.reach else Cell("not shown to end", "faint")


def gain_cell(reading: Reading) -> Cell | str:
    gain = reading.gain
    if gain is None:
        return NONE
    tone = "" if math.isnan(gain.low) else "better" if gain.low > 0 else "worse" if gain.high < 0 else ""
    return Cell(with_ends(gain), tone)


def levels(comparison: Comparison) -> Table:
    """NLL of every variant at every length."""
    losses = comparison.losses
    rows: list[list[Cell | str]] = []
    for line in comparison.lines:
        row: list[Cell | str] = [line.variant.name]
        for one in line.readings:
            if one.nll is None:
                row.append(NONE)
                continue
            spread = "" if math.isnan(one.nll.low) else f" ± {one.nll.half:.3f}"
            row.append(f"{one.nll.estimate:.3f}{spread}")
        rows.append(row)
    if losses.unigram is not None:
        level = Cell(f"{losses.unigram.mean():.3f}", "faint")
        rows.append([Cell("unigram model", "faint"), *[level for _ in losses.lengths]])
    return Table(
        "NLL at each length",
        ["scheme", *(f"{n:,}" for n in losses.lengths)],
        rows,
        f"nats a token, mean over {losses.kind}s. ± is {100 * comparison.confidence:g}% over seeds and "
        f"{losses.kind}s for each by itself; most of it is how much {losses.kind}s differ, which is "
        "common to "
        "all rows: differences are told apart far better than levels.",
    )


def verdicts(comparison: Comparison) -> Table:
    """The verdict and the change at every length beyond the trained one."""
    losses = comparison.losses
    beyond = [n for n in losses.lengths if n > losses.trained_length]
    rows: list[list[Cell | str]] = []
    for line in comparison.lines:
        found = {one.length: one for one in line.readings}
        row: list[Cell | str] = [line.variant.name]
        for length in beyond:
            one = found[length]
            if one.delta is None:
                row.append(Cell("—", "faint"))
            else:
                row.append(Cell(f"{MARK[one.word]} {with_ends(one.delta)}", one.word.split()[0]))
        rows.append(row)
    return Table(
        f"Change against the trained length {losses.trained_length:,}, and the verdict",
        ["scheme", *(f"{n:,}" for n in beyond)],
        rows,
        f"Broken: the lower end, simultaneous over {comparison.family} comparisons, is above "
        f"{comparison.tolerance:g} "
        f"nats. Held: the one-sided 97.5% upper bound is below {comparison.tolerance:g} here and at "
        "every shorter "
        "length. Else undecided: held is never inferred from not broken.",
    )


def gains(comparison: Comparison) -> Table:
    """Net gain over truncation at each length, and the gain of each step of the grid."""
    losses = comparison.losses
    beyond = [n for n in losses.lengths if n > losses.trained_length]
    rows: list[list[Cell | str]] = []
    for line in comparison.lines:
        found = {one.length: one for one in line.readings}
        rows.append([line.variant.name, *(gain_cell(found[n]) for n in beyond)])
    return Table(
        "Net gain over truncation",
        ["scheme", *(f"{n:,}" for n in beyond)],
        rows,
        f"NLL with the context cut to {losses.trained_length:,} less NLL with the whole context: "
        "positive where the "
        f"far context helps. {100 * comparison.confidence:g}% for each by itself.",
    )


def doublings(comparison: Comparison) -> Table | None:
    """What each step of the grid gives."""
    lines = [line for line in comparison.lines if line.doublings]
    if not lines:
        return None
    steps = list(dict.fromkeys((a, b) for line in lines for a, b, _ in line.doublings))
    rows: list[list[Cell | str]] = []
    for line in lines:
        found = {(a, b): one for a, b, one in line.doublings}
        rows.append([line.variant.name, *(with_ends(found[s]) if s in found else NONE for s in steps)])
    return Table(
        "Gain of each step to a longer context",
        ["scheme", *(f"{a:,} → {b:,}" for a, b in steps)],
        rows,
        "NLL at the shorter less NLL at the longer: positive where more context helps. For each by itself.",
    )


def differences(comparison: Comparison) -> Table:
    """Every variant against the baseline at the primary lengths."""
    found = {(one.variant, one.length): one for one in comparison.differences}
    names = list(dict.fromkeys(one.variant for one in comparison.differences))
    rows: list[list[Cell | str]] = []
    for name in names:
        row: list[Cell | str] = [name]
        for length in comparison.primary:
            one = found.get((name, length))
            if one is None:
                row.append(NONE)
                continue
            at = one.interval
            tone = "" if math.isnan(at.low) else "better" if at.high < 0 else "worse" if at.low > 0 else ""
            row.append(Cell(with_ends(at), tone))
        rows.append(row)
    paired = sorted({one.variant for one in comparison.differences if one.paired})
    note = (
        f"NLL less that of {comparison.baseline}; negative is better. Intervals over seeds and "
        f"{comparison.losses.kind}s, simultaneous over {comparison.difference_family} comparisons."
    )
    if paired:
        note += f" {', '.join(paired)}: the same checkpoints as {comparison.baseline}, paired seed by seed."
    return Table(
        f"Difference from {comparison.baseline}",
        ["scheme", *(f"{n:,}" for n in comparison.primary)],
        rows,
        note,
    )


def apart(comparison: Comparison, found: Sequence[Apart]) -> Table:
    """The units outside and inside the training text, each by themselves."""
    kind = comparison.losses.kind
    words = {"unseen": f"{kind}s not in the training text", "seen": f"{kind}s of the training text"}
    rows = [
        [
            one.variant,
            words[one.where],
            str(one.units),
            f"{one.targets:,}",
            f"{one.trained.estimate:.3f}",
            f"{one.length:,}",
            f"{one.nll.estimate:.3f}",
            with_ends(one.gain),
        ]
        for one in found
    ]
    columns = ["scheme", "part", f"{kind}s", "targets", f"NLL at {comparison.losses.trained_length:,}"]
    return Table(
        f"By whether the {kind} also occurs in the training text",
        [*columns, "longest", "NLL there", "gain over truncation"],
        rows,
        "Intervals only where a part has at least 6 units and the scheme at least 3 seeds.",
        numbers=2,
    )


COSTS = (  # heading, where it stands, key, how it is written
    ("parameters", "training", "parameters", lambda v: f"{v:,.0f}"),
    ("tokens", "training", "tokens", lambda v: f"{v:,.0f}"),
    ("FLOPs a token", "training", "flops_per_token", lambda v: scaled(v)),
    ("training FLOPs", "training", "flops", lambda v: scaled(v)),
    ("last training loss", "training", "loss", lambda v: f"{v:.3f}"),
    ("tokens/s", "timing", "tokens_per_second", lambda v: f"{v:,.0f}"),
    ("seconds", "timing", "seconds", lambda v: f"{v:,.0f}"),
    ("peak memory, MiB", "timing", "peak_memory_bytes", lambda v: f"{v / 2**20:,.0f}"),
)


def scaled(value: float) -> str:
    """`1.23 T`: three digits and a prefix of the SI."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g} {prefix}"
    return f"{value:.3g}"


def costs(study: Study, group: Group, comparison: Comparison | None) -> Table:
    """What each scheme's training took beside what it reached; means over its seeds."""
    rows: list[list[Cell | str]] = []
    for variant in study.variants:
        cells = [cell.record for cell in study.of(variant, group) if cell.record.get("training")]
        if not cells or any(
            v.scheme == variant.scheme for v in study.variants[: study.variants.index(variant)]
        ):
            continue
        row: list[Cell | str] = [variant.scheme]
        line = comparison.line(variant.name) if comparison else None
        row.append(plain(line.trained.estimate) if line else NONE)
        for _, part, key, write in COSTS:
            values = [c[part][key] for c in cells if (c.get(part) or {}).get(key) is not None]
            row.append(write(sum(values) / len(values)) if values else NONE)
        rows.append(row)
    found = [(cell.record.get("timing") or {}).get("machine") for cell in study.cells]
    machines = list(dict.fromkeys(_machine(one) for one in found if one))
    note = "Means over seeds."
    if machines:
        note += f" Speed and memory on: {'; '.join(machines)}."
    l0 = comparison.losses.trained_length if comparison else None
    at = f"NLL at {l0:,}" if l0 else "NLL"
    return Table("What it cost", ["scheme", at, *(c[0] for c in COSTS)], rows, note)


def _machine(about: dict) -> str:
    """`AMD EPYC, 1 thread` or `NVIDIA H200`."""
    gpus, threads = about.get("gpus") or [], about.get("threads")
    if gpus:
        return ", ".join(str(one) for one in gpus)
    return str(about.get("processor", "a machine")) + (f", {counted(threads, 'thread')}" if threads else "")


def basis(comparison: Comparison, study: Study) -> Table:
    """What every number of an evaluation rests on."""
    losses = comparison.losses
    facts = losses.facts
    documents = facts.get("documents")
    of = f" of {documents} documents" if documents and losses.kind != "document" else ""
    seeds = {v.name: [*losses.reference[v.name]] for v in losses.variants if v.name in losses.reference}
    rows = [
        ["protocol", str(facts.get("protocol"))],
        ["lengths, tokens", ", ".join(f"{n:,}" for n in losses.lengths)],
        ["trained length", f"{losses.trained_length:,}"],
        ["targets", f"{int(losses.targets.sum()):,}"],
        [
            "units",
            f"{len(losses.units)} {losses.kind}s{of}",
        ],
        ["names of the units", _some(losses.units)],
        ["BOS rule", str(facts.get("bos"))],
        ["corpus", f"{facts.get('corpus', '')}"],
        ["corpus hash", str(facts.get("corpus_hash", ""))],
        ["tokenizer hash", str(facts.get("tokenizer_hash", ""))],
        ["targets hash", str(facts.get("targets_hash", ""))],
        ["arithmetic", str(facts.get("dtype"))],
        ["seed of the evaluation", str(facts.get("seed"))],
        ["training seeds", "; ".join(f"{name}: {', '.join(found)}" for name, found in seeds.items())],
        ["tolerance", f"{comparison.tolerance:g} nats"],
        ["level", f"{100 * comparison.confidence:g}%"],
        ["families", f"verdicts: {comparison.family}; differences: {comparison.difference_family}"],
    ]
    return Table("What the numbers rest on", ["", ""], [r for r in rows if r[1]], numbers=2)


def _some(names: Sequence[str], most: int = 24) -> str:
    more = f" and {len(names) - most} more (all in results.json)" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def checkpoints(study: Study) -> Table:
    """The trainings behind the report."""
    rows: list[list[Cell | str]] = []
    for cell in study.cells:
        training = cell.record.get("training") or {}
        if not training:
            continue
        rows.append(
            [
                cell.id,
                f"{training.get('steps', '')}",
                str(training.get("checkpoint_hash") or "")[:16],
                str(training.get("data_hash") or "")[:16],
                str(training.get("run") or ""),
            ]
        )
    note = "First 16 digits of each SHA-256; whole in results.json."
    return Table("Checkpoints", ["cell", "steps", "checkpoint", "data", "run"], rows, note, numbers=5)


def failures(study: Study) -> Table | None:
    """Cells without results, and why."""
    rows = [
        [cell.id, Cell(cell.record["status"], "broken"), str(cell.record.get("error") or "not run yet")]
        for cell in study.cells
        if not cell.finished
    ]
    return Table("Cells without results", ["cell", "state", "why"], rows, numbers=3) if rows else None


def absent(comparisons: Sequence[Comparison]) -> Table | None:
    """Lengths that a scheme cannot be read at, and results that stand apart."""
    rows: list[list[str]] = []
    for comparison in comparisons:
        losses = comparison.losses
        reasons: dict[tuple[str, str], list[int]] = {}
        for (name, length), why in losses.missing.items():
            reasons.setdefault((name, why), []).append(length)
        rows += [
            [losses.name, name, ", ".join(f"{n:,}" for n in sorted(lengths)), why]
            for (name, why), lengths in reasons.items()
        ]
        rows += [[losses.name, cell, "all", why] for cell, why in losses.apart.items()]
    if not rows:
        return None
    return Table("Lengths and results left out", ["evaluation", "scheme", "lengths", "why"], rows, numbers=4)
