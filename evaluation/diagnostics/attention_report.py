"""Report of `protocol: attention`.

results.json, in addition to `protocol`, `trained_length`, `checkpoint_hash` and the like:

    cells         flat: method, length, layer, head, measure, value, low, high. head null: the mean over the
                  layer's heads; layer null too: over all layers. low and high, where head is null: the
                  interval over units (documents or clusters), null with fewer than 6. The measures are in
                  `measures`; one that does not exist for a cell has no row.
    by_distance   method, length, layer, head (null as above), edges (buckets + 1), mass (of each
                  bucket), and uniform: the mass of uniform attention over the visible keys.
    pairs         rotary pairs: method, length, kind of layer, pair, wavelength (null: no rotation), turns
                  within that length, turns_trained within the trained length as trained.
    tables        method, length, variant, off: largest difference of table entries from float64.
    precision     method, length, dtype, and differences of the model's outputs from float64 on the same
                  windows: logit_max, logit_mean, nll_max, nll_mean (signed).
    absent        method, length, reason: cells that do not exist.
    mismatch      largest |weights·values − output of the model's own kernel| over all cells.
"""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from evaluation.diagnostics.attention import AttentionResult, mean_of_finite
from evaluation.diagnostics.figures import draw_attention
from evaluation.diagnostics.weights import MEASURES
from evaluation.reports.base import Report, Table, basis, provenance, rounded
from evaluation.reports.sentences import name_of
from evaluation.scoring.methods import TRAINED
from evaluation.statistics.intervals import POINTS_ONLY_BELOW, interval, unit_means

SHOWN = {  # columns of the table: measure -> heading, format
    "entropy": ("entropy, nats", ".2f"),
    "entropy_relative": ("of ln n", ".0%"),
    "first_token": ("on first token", ".1%"),
    "mass_beyond": ("beyond L0", ".1%"),
    "logit_std": ("logit sd", ".2f"),
    "logit_max": ("logit max", ".2f"),
    "reach_90": ("reach 90%", ",.0f"),
}


class AttentionReport(Report):
    def __init__(self, result: AttentionResult, name: str = "attention"):
        self.result, self.name = result, name

    def rows(self) -> list[dict]:
        """One record for each method, length, layer or all, head or all, and measure."""
        rows, found = [], self.result
        for (method, length), seen in found.seen.items():
            where = {"method": method, "length": length}
            for measure, tensor in seen.values.items():
                values = tensor.numpy()  # (W, layers, H)
                rows.append(self._over(where, None, None, measure, mean_of_finite(values, (1, 2))))
                for layer in range(values.shape[1]):
                    rows.append(
                        self._over(where, layer, None, measure, mean_of_finite(values[:, layer], (1,)))
                    )
                    for head in range(values.shape[2]):
                        value = mean_of_finite(values[:, layer, head], (0,))
                        place = {"layer": layer, "head": head, "measure": measure}
                        rows.append(
                            {**where, **place, "value": rounded(float(value)), "low": None, "high": None}
                        )
        return [row for row in rows if row["value"] is not None]

    def document(self) -> dict:
        return {
            "kind": "attention",
            **diagnostic_basis(self.result),
            "targets_hash": self.result.plan.hash,
            "windows": self.result.windows,
            "queries": self.result.settings.targets,
            "lengths": self.result.plan.lengths,
            "layer_kinds": self.result.layer_kinds,
            "measures": MEASURES,
            "cells": self.rows(),
            "by_distance": self.by_distance(),
            "pairs": [
                {
                    "method": method,
                    "length": length,
                    **{
                        k: v if k in ("kind", "pair") or v is None else rounded(v)
                        for k, v in asdict(pair).items()
                    },
                }
                for (method, length), pairs in self.result.pairs.items()
                for pair in pairs
            ],
            "tables": [
                {"method": method, "length": length, "variant": variant, "off": rounded(off)}
                for (method, length), drift in self.result.tables.items()
                for variant, off in drift.items()
            ],
            "precision": [
                {
                    "method": method,
                    "length": length,
                    "dtype": dtype,
                    **{k: rounded(v) for k, v in off.items()},
                }
                for (method, length, dtype), off in self.result.drift.items()
            ],
            "absent": [
                {"method": r, "length": n, "reason": reason} for (r, n), reason in self.result.absent.items()
            ],
            "mismatch": max((seen.mismatch for seen in self.result.seen.values()), default=None),
        }

    def by_distance(self) -> list[dict]:
        """Mass by distance of every layer and head, and of the means over them."""
        rows, found = [], self.result
        for (method, length), seen in found.seen.items():
            mass, uniform = seen.by_distance.mean(0), seen.visible  # (layers, H, buckets), (layers, buckets)
            common = {"method": method, "length": length}
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

    def draw(self, folder: Path) -> list[Path]:
        return draw_attention(self.result, folder)

    def summary(self) -> list[str]:
        lines, found = [], self.result
        for method in found.methods:
            lengths = [n for n in found.plan.lengths if (method.label, n) in found.seen]
            if lengths:
                lines.append(_method_sentence(found, method.label, lengths))
        lines += [s for s in (_pairs_sentence(found), *_precision_sentences(found)) if s]
        unit = found.unit_kind + "s"
        units = len(set(found.unit.tolist()))
        lines.append(
            f"Means over the last {found.settings.targets} queries of {found.windows} windows of "
            f"{found.documents} documents ({units} {unit}), over all heads and layers"
            + (
                f"; fewer than {POINTS_ONLY_BELOW} units, so no intervals."
                if units < POINTS_ONLY_BELOW
                else "."
            )
        )
        for (method, length), reason in found.absent.items():
            lines.append(f"{method} at {length}: {reason}.")
        return lines

    def tables(self) -> list[Table]:
        rows, found = [], self.result
        for method in found.methods:
            for length in found.plan.lengths:
                seen = found.seen.get((method.label, length))
                if seen is None:
                    rows.append([method.label, str(length), *["—"] * len(SHOWN)])
                    continue
                means = found.overall(method.label, length)
                shown = [format(means[m], f) if m in means else "—" for m, (_, f) in SHOWN.items()]
                rows.append([method.label, str(length), *shown])
        columns = ["method", "length", *(heading for heading, _ in SHOWN.values())]
        return [("attention: means over layers, heads and queries", columns, rows)]

    def _over(
        self, where: dict, layer: int | None, head: int | None, measure: str, by_window: np.ndarray
    ) -> dict:
        """A record with its interval over units."""
        there = np.isfinite(by_window)
        place = {"layer": layer, "head": head, "measure": measure}
        if not there.any():
            return {**where, **place, "value": None, "low": None, "high": None}
        means = unit_means(by_window[there], self.result.unit[there])
        span = interval(means, alpha=1 - self.result.settings.confidence, resamples=0)
        ends = {"value": span.estimate, "low": span.low, "high": span.high}
        return {**where, **place, **{key: rounded(value) for key, value in ends.items()}}


def _method_sentence(found: AttentionResult, method: str, lengths: list[int]) -> str:
    name = name_of(method)
    first, last = (found.overall(method, n) for n in (lengths[0], lengths[-1]))
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


def _pairs_sentence(found: AttentionResult) -> str:
    l0 = found.subject.trained_length
    place = next(((r, n) for (r, n) in found.pairs if r == TRAINED), None)
    if place is None:
        return ""
    pairs = found.pairs[place]
    slow = sum(pair.turns_trained < 1 for pair in pairs)
    text = f"{slow} of {len(pairs)} rotary pairs never completed a turn within {l0:,} tokens"
    shares = [
        (n, found.overall(TRAINED, n).get("unturned_variance"))
        for n in found.plan.lengths
        if (TRAINED, n) in found.seen
    ]
    known = [(n, share) for n, share in shares if share is not None]
    if known:
        text += "; their share of the logits' variance is " + ", ".join(
            f"{s:.0%} at {n:,}" for n, s in known[:: max(1, len(known) - 1)]
        )
    return text + "."


def _precision_sentences(found: AttentionResult) -> list[str]:
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


def diagnostic_basis(result) -> dict:
    """What the numbers of a diagnostic depend on."""
    return {
        **basis(result),
        "documents": result.documents,
        "units": len(set(result.unit.tolist())),
        "unit": result.unit_kind,
        "bos": result.settings.bos,
        "corpus": result.facts.get("corpus", ""),
        "corpus_hash": result.facts["corpus_hash"],
        "tokenizer_hash": result.facts["tokenizer_hash"],
        **provenance(result),
    }
