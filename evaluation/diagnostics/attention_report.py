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

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from evaluation.diagnostics.attention import AttentionResult, mean_of_finite
from evaluation.diagnostics.figures import draw_attention
from evaluation.diagnostics.weights import MEASURES
from evaluation.reports.base import (
    NO_ENDS,
    Report,
    Table,
    dtype_note,
    over_units,
    rounded,
    rounded_record,
)
from evaluation.reports.sentences import sentences
from evaluation.scoring.methods import TRAINED

SHOWN = {  # columns of the table: measure -> heading, format
    "entropy": ("entropy, nats", ".2f"),
    "entropy_relative": ("of ln n", ".0%"),
    "first_token": ("on first token", ".1%"),
    "mass_beyond": ("beyond L0", ".1%"),
    "logit_std": ("logit sd", ".2f"),
    "logit_max": ("logit max", ".2f"),
    "reach_90": ("reach 90%", ",.0f"),
}
Place = tuple[int | None, int | None]  # layer and head; None: the mean over all of them


def places(layers: int, heads: int) -> Iterator[Place]:
    """The mean over all layers and heads, then each layer: the mean over its heads, and each head."""
    yield None, None
    for layer in range(layers):
        yield from ((layer, head) for head in (None, *range(heads)))


def at(values: torch.Tensor, place: Place) -> torch.Tensor:
    """The part of (W, layers, H, ...) of a place, with as many axes."""
    layer, head = (slice(None) if one is None else slice(one, one + 1) for one in place)
    return values[:, layer, head]


class AttentionReport(Report):
    def __init__(self, result: AttentionResult, name: str = "attention"):
        self.result = result
        self.name = name

    def rows(self) -> list[dict]:
        """One record for each method, length, layer or all, head or all, and measure."""
        rows = []
        for (method, length), seen in self.result.seen.items():
            for measure, values in seen.values.items():  # (W, layers, H)
                for layer, head in places(*values.shape[1:]):
                    by_window = mean_of_finite(at(values, (layer, head)).numpy(), (1, 2))
                    if head is None:
                        numbers = over_units(self.result, by_window)
                    else:
                        numbers = {
                            "value": rounded(float(mean_of_finite(by_window, (0,)))),
                            **NO_ENDS,
                        }
                    where = {"method": method, "length": length, "layer": layer, "head": head}
                    rows.append({**where, "measure": measure, **numbers})
        return [row for row in rows if row["value"] is not None]

    def document(self) -> dict:
        found = self.result

        def records(table: dict[tuple, dict], *names: str) -> list[dict]:
            return [
                dict(zip(names, key, strict=True)) | rounded_record(row)
                for key, row in table.items()
            ]

        pairs = {
            (*key, n): asdict(pair)
            for key, pairs in found.pairs.items()
            for n, pair in enumerate(pairs)
        }
        tables = {
            (*key, name): {"off": off}
            for key, one in found.tables.items()
            for name, off in one.items()
        }
        absent = {key: {"reason": reason} for key, reason in found.absent.items()}
        return {
            "kind": "attention",
            **found.basis(),
            "targets_hash": found.plan.hash,
            "windows": found.windows,
            "queries": found.settings.targets,
            "lengths": found.plan.lengths,
            "layer_kinds": found.layer_kinds,
            "measures": MEASURES,
            "cells": self.rows(),
            "by_distance": self.by_distance(),
            "pairs": records(pairs, "method", "length", "pair"),
            "tables": records(tables, "method", "length", "variant"),
            "precision": records(found.drift, "method", "length", "dtype"),
            "absent": records(absent, "method", "length"),
            "mismatch": max((seen.mismatch for seen in found.seen.values()), default=None),
        }

    def by_distance(self) -> list[dict]:
        """Mass by distance of every layer and head, and of the means over them."""
        rows = []
        for (method, length), seen in self.result.seen.items():
            edges = self.result.edges(length)
            (_, layers, heads, _) = seen.by_distance.shape
            for layer, head in places(layers, heads):
                mass = at(seen.by_distance, (layer, head)).mean((0, 1, 2)).tolist()
                uniform = (seen.visible.mean(0) if layer is None else seen.visible[layer]).tolist()
                where = {
                    "method": method,
                    "length": length,
                    "layer": layer,
                    "head": head,
                    "edges": edges,
                }
                rows.append(
                    {**where, "mass": [*map(rounded, mass)], "uniform": [*map(rounded, uniform)]}
                )
        return rows

    def draw(self, folder: Path) -> list[Path]:
        return draw_attention(self.result, folder)

    def summary(self) -> list[str]:
        found = self.result
        drift = {}
        for dtype in found.settings.precision:
            rows = [
                (n, row)
                for (label, n, one), row in found.drift.items()
                if (label, one) == (TRAINED, dtype)
            ]
            drift[dtype] = sorted(rows, key=lambda row: -abs(row[1]["nll_mean"]))
        shares = [
            (n, found.overall(TRAINED, n).get("unturned_variance"))
            for n in found.lengths_of(TRAINED)
        ]
        shares = [(n, share) for n, share in shares if share is not None]
        return sentences(
            "attention",
            found=found,
            pairs=next(
                (pairs for (label, _), pairs in found.pairs.items() if label == TRAINED), []
            ),
            shares=shares[:: max(1, len(shares) - 1)],
            drift=drift,
        )

    def tables(self) -> list[Table]:
        rows = []
        found = self.result
        for method in found.methods:
            for length in found.plan.lengths:
                seen = found.seen.get((method.label, length))
                means = {} if seen is None else found.overall(method.label, length)
                shown = [format(means[m], f) if m in means else "—" for m, (_, f) in SHOWN.items()]
                rows.append([method.label, str(length), *shown])
        columns = ["method", "length", *(heading for heading, _ in SHOWN.values())]
        title = "attention: means over layers, heads and queries" + dtype_note(found.settings)
        return [(title, columns, rows)]
