"""What `protocol: attention` leaves behind: words, a table, CSV and JSON.

results.json, beside what the numbers rest on (`protocol`, `trained_length`, `checkpoint_hash`, ...):

    cells         flat: rule, length, layer, head, measure, value, low, high. head null: the mean over the
                  layer's heads; layer null too: over all layers. low and high, where head is null: the
                  interval over units (documents or clusters), null with fewer than 6. The measures are in
                  `measures`, with what each means; one that does not exist for a cell has no row.
    by_distance   rule, length, layer, head (null as above), edges (buckets + 1), mass (one for each bucket),
                  and uniform: what attention spread evenly over the visible keys would put there.
    pairs         rotary pairs: rule, length, kind of layer, pair, wavelength (null: it stands still), turns
                  within that length, turns_trained within the trained length as trained.
    tables        rule, length, variant, off: largest difference of table entries from float64.
    precision     rule, length, dtype, and differences of the model's outputs from float64 on the same
                  windows: logit_max, logit_mean, nll_max, nll_mean (signed).
    absent        rule, length, reason: cells that do not exist.
    mismatch      largest |weights·values − output of the model's own kernel| over all cells.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.files import write_json, write_text
from evaluation.diagnostics.attention import Attention
from evaluation.diagnostics.weights import MEASURES, Seen
from evaluation.rules import TRAINED
from evaluation.statistics import POINTS_ONLY_BELOW, interval, unit_means

COLUMNS = ("rule", "length", "layer", "head", "measure", "value", "low", "high")
SHOWN = {  # columns of the table: measure -> heading, format
    "entropy": ("entropy, nats", ".2f"),
    "entropy_relative": ("of ln n", ".0%"),
    "first_token": ("on first token", ".1%"),
    "mass_beyond": ("beyond L0", ".1%"),
    "logit_std": ("logit sd", ".2f"),
    "logit_max": ("logit max", ".2f"),
    "reach_90": ("reach 90%", ",.0f"),
}


def rounded(value: float) -> float | None:
    """Six digits, for a file that people and programs read; null where there is no number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def cells(found: Attention) -> list[dict]:
    """One flat record for each rule, length, layer or all, head or all, and measure."""
    rows = []
    for (rule, length), seen in found.seen.items():
        where = {"rule": rule, "length": length}
        for measure, tensor in seen.values.items():
            values = tensor.numpy()  # (W, layers, H)
            rows.append(_over(where, None, None, measure, _mean(values, (1, 2)), found))
            for layer in range(values.shape[1]):
                rows.append(_over(where, layer, None, measure, _mean(values[:, layer], (1,)), found))
                for head in range(values.shape[2]):
                    value = _mean(values[:, layer, head], (0,))
                    place = {"layer": layer, "head": head, "measure": measure}
                    rows.append({**where, **place, "value": rounded(float(value)), "low": None, "high": None})
    return [row for row in rows if row["value"] is not None]


def _mean(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Mean over axes of what is a number; NaN where none is."""
    there = np.isfinite(values)
    count = there.sum(axes)
    total = np.where(there, values, 0.0).sum(axes)
    return np.where(count > 0, total / np.maximum(count, 1), math.nan)


def _over(where: dict, layer: int | None, head: int | None, measure: str, by_window, found) -> dict:
    """A record with its interval over units."""
    there = np.isfinite(by_window)
    place = {"layer": layer, "head": head, "measure": measure}
    if not there.any():
        return {**where, **place, "value": None, "low": None, "high": None}
    means = unit_means(by_window[there], found.unit[there])
    span = interval(means, alpha=1 - found.settings.confidence, resamples=0)
    ends = {"value": span.estimate, "low": span.low, "high": span.high}
    return {**where, **place, **{key: rounded(value) for key, value in ends.items()}}


def by_distance(found: Attention) -> list[dict]:
    """Mass by distance of every layer and head, and of the means over them."""
    rows = []
    for (rule, length), seen in found.seen.items():
        mass, uniform = seen.by_distance.mean(0), seen.visible  # (layers, H, buckets), (layers, buckets)
        common = {"rule": rule, "length": length}
        edges = found.edges(length)

        def row(layer, head, mass, uniform, common=common, edges=edges) -> dict:
            numbers = {"mass": mass, "uniform": uniform}
            lists = {key: [rounded(x) for x in value.tolist()] for key, value in numbers.items()}
            return {**common, "layer": layer, "head": head, "edges": edges, **lists}

        rows.append(row(None, None, mass.mean((0, 1)), uniform.mean(0)))
        for layer in range(len(mass)):
            rows.append(row(layer, None, mass[layer].mean(0), uniform[layer]))
            rows += [row(layer, head, mass[layer, head], uniform[layer]) for head in range(mass.shape[1])]
    return rows


def overall(found: Attention, seen: Seen) -> dict[str, float]:
    """Means over layers, heads and units, by measure."""
    out = {}
    for measure, tensor in seen.values.items():
        by_window = _mean(tensor.numpy(), (1, 2))
        there = np.isfinite(by_window)
        if there.any():
            out[measure] = float(unit_means(by_window[there], found.unit[there]).mean())
    return out


def words(found: Attention) -> list[str]:
    """What happened, in sentences."""
    lines = []
    for rule in found.rules:
        lengths = [n for n in found.plan.lengths if (rule.label, n) in found.seen]
        if lengths:
            lines.append(_rule_sentence(found, rule.label, lengths))
    lines += [s for s in (_pairs_sentence(found), *_precision_sentences(found)) if s]
    unit = found.unit_kind + "s"
    units = len(set(found.unit.tolist()))
    lines.append(
        f"Means over the last {found.settings.targets} queries of {found.windows} windows of "
        f"{found.documents} documents ({units} {unit}), all heads and layers alike"
        + (
            f"; fewer than {POINTS_ONLY_BELOW} units, hence no intervals."
            if units < POINTS_ONLY_BELOW
            else "."
        )
    )
    for (rule, length), reason in found.absent.items():
        lines.append(f"{rule} at {length}: {reason}.")
    return lines


def _rule_sentence(found: Attention, rule: str, lengths: list[int]) -> str:
    name = "as trained" if rule == TRAINED else rule
    first, last = (overall(found, found.seen[rule, n]) for n in (lengths[0], lengths[-1]))
    if len(lengths) == 1:
        return (
            f"{name} at {lengths[0]:,}: entropy {first['entropy']:.2f} nats "
            f"({first['entropy_relative']:.0%} of ln n), {first['first_token']:.1%} of the mass on the first "
            "token."
        )
    return (
        f"{name}, from {lengths[0]:,} to {lengths[-1]:,} tokens: entropy {first['entropy']:.2f} → "
        f"{last['entropy']:.2f} nats ({first['entropy_relative']:.0%} → {last['entropy_relative']:.0%} of "
        f"ln n), mass on the first token {first['first_token']:.1%} → {last['first_token']:.1%}, "
        f"beyond the trained distance {last['mass_beyond']:.1%}, logit sd {first['logit_std']:.2f} → "
        f"{last['logit_std']:.2f}, 90% of the mass within {first['reach_90']:,.0f} → "
        f"{last['reach_90']:,.0f} tokens."
    )


def _pairs_sentence(found: Attention) -> str:
    l0 = found.subject.trained_length
    place = next(((r, n) for (r, n) in found.pairs if r == TRAINED), None)
    if place is None:
        return ""
    pairs = found.pairs[place]
    slow = sum(pair.turns_trained < 1 for pair in pairs)
    text = f"{slow} of {len(pairs)} rotary pairs never completed a turn within {l0:,} tokens"
    shares = [
        (n, overall(found, found.seen[TRAINED, n]).get("unturned_variance"))
        for n in found.plan.lengths
        if (TRAINED, n) in found.seen
    ]
    known = [(n, share) for n, share in shares if share is not None]
    if known:
        text += "; in the logits' variance they make up " + ", ".join(
            f"{s:.0%} at {n:,}" for n, s in known[:: max(1, len(known) - 1)]
        )
    return text + "."


def _precision_sentences(found: Attention) -> list[str]:
    lines = []
    for dtype in found.settings.precision:
        rows = [(n, d) for (r, n, t), d in found.drift.items() if r == TRAINED and t == dtype]
        if rows:
            n, worst = max(rows, key=lambda row: abs(row[1]["nll_mean"]))
            lines.append(
                f"{dtype} against float64: mean NLL off by at most {abs(worst['nll_mean']):.1e} nats "
                f"(at {n:,}), single targets by {max(d['nll_max'] for _, d in rows):.1e}."
            )
    return lines


def table(found: Attention) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns, rows for a terminal: the means over layers and heads."""
    rows = []
    for rule in found.rules:
        for length in found.plan.lengths:
            seen = found.seen.get((rule.label, length))
            if seen is None:
                rows.append([rule.label, str(length), *["—"] * len(SHOWN)])
                continue
            means = overall(found, seen)
            shown = [format(means[m], f) if m in means else "—" for m, (_, f) in SHOWN.items()]
            rows.append([rule.label, str(length), *shown])
    columns = ["rule", "length", *(heading for heading, _ in SHOWN.values())]
    return "attention: means over layers, heads and queries", columns, rows


def basis(found) -> dict:
    """What every number rests on."""
    subject, settings = found.subject, found.settings
    return {
        "protocol": settings.protocol,
        "trained_length": subject.trained_length,
        "documents": found.documents,
        "units": len(set(found.unit.tolist())),
        "unit": found.unit_kind,
        "confidence": settings.confidence,
        "bos": settings.bos,
        "corpus": found.facts.get("corpus", ""),
        "corpus_hash": found.facts["corpus_hash"],
        "tokenizer_hash": found.facts["tokenizer_hash"],
        "checkpoint": subject.name,
        "checkpoint_step": subject.step,
        "checkpoint_hash": subject.checkpoint_hash,
        "dtype": settings.dtype,
        "seed": settings.seed,
        **{key: found.facts[key] for key in ("command", "changed", "finished") if key in found.facts},
        "settings": settings.model_dump(mode="json"),
        "rules": {
            rule.label: {"words": list(rule.words), "position": found.schemes[rule.label]}
            for rule in found.rules
        },
    }


def write(found: Attention, folder: Path) -> None:
    """`results.csv`, `results.json` and `summary.txt` in `folder`."""
    rows, summary = cells(found), words(found)
    document = {
        "format": 1,
        "kind": "attention",
        "summary": summary,
        **basis(found),
        "targets_hash": found.plan.hash,
        "windows": found.windows,
        "queries": found.settings.targets,
        "lengths": found.plan.lengths,
        "layer_kinds": found.layer_kinds,
        "measures": MEASURES,
        "cells": rows,
        "by_distance": by_distance(found),
        "pairs": [
            {
                "rule": rule,
                "length": length,
                **{
                    k: v if k in ("kind", "pair") or v is None else rounded(v)
                    for k, v in asdict(pair).items()
                },
            }
            for (rule, length), pairs in found.pairs.items()
            for pair in pairs
        ],
        "tables": [
            {"rule": rule, "length": length, "variant": variant, "off": rounded(off)}
            for (rule, length), drift in found.tables.items()
            for variant, off in drift.items()
        ],
        "precision": [
            {"rule": rule, "length": length, "dtype": dtype, **{k: rounded(v) for k, v in off.items()}}
            for (rule, length, dtype), off in found.drift.items()
        ],
        "absent": [{"rule": r, "length": n, "reason": reason} for (r, n), reason in found.absent.items()],
        "mismatch": max((seen.mismatch for seen in found.seen.values()), default=None),
    }
    write_table(folder / "results.csv", COLUMNS, rows)
    write_json(folder / "results.json", document)
    write_text(folder / "summary.txt", "\n".join(summary) + "\n")


def write_table(path: Path, columns: tuple[str, ...], rows: list[dict]) -> None:
    """CSV of records with these keys."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
