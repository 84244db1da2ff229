"""Synthetic results of tasks and diagnostics, in the format of evaluate.py."""

from __future__ import annotations

import numpy as np

from tests.studies.synthetic import L0

LENGTHS = (128, 256, 512, 1024)
CHANCE = 0.1
# Share of right answers at each length, before a unit's own part.
ACCURACY = {
    "rope": (0.97, 0.95, 0.30, 0.11),
    "window": (0.96, 0.60, 0.30, 0.15),
    "alibi": (0.9, 0.9, 0.85, 0.8),
}


def add(record: dict, draw: int = 0) -> dict:
    """The same results with four evaluations more in every finished cell of a scheme of `ACCURACY`."""
    rng = np.random.default_rng(draw)
    for cell in record["cells"]:
        scheme = cell["axes"]["scheme"]
        if cell["status"] == "done" and scheme in ACCURACY:
            methods = ["trained", "yarn"] if scheme == "rope" else ["trained"]
            cell["evaluations"] |= {
                "passkey": passkey(ACCURACY[scheme], methods, rng),
                "attention": attention(methods, rng),
                "generation": generation(methods, rng),
                "position": position(methods, rng),
            }
    return record


def passkey(shares: tuple[float, ...], methods: list[str], rng: np.random.Generator) -> dict:
    cells = []
    spots = []
    for method in methods:
        for length, share in zip(LENGTHS, shares, strict=True):
            units = np.clip(share + rng.normal(0, 0.02, 20), 0, 1)
            cells.append(
                {
                    "method": method,
                    "length": length,
                    "accuracy": float(units.mean()),
                    "exact": float(units.mean()) / 2,
                    "unit_accuracy": units.tolist(),
                    "unit_exact": (units / 2).tolist(),
                }
            )
            for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
                right = {
                    "share": share * (0.8 + 0.2 * depth),
                    "n": 80,
                    "low": 0.0,
                    "high": 1.0,
                    "n_eff": 80.0,
                }
                spots.append(
                    {
                        "method": method,
                        "length": length,
                        "where": depth,
                        "until": None,
                        "share": right,
                        "exact": right,
                    }
                )
    return {
        "format": 1,
        "protocol": "tasks",
        "task": "passkey",
        "trained_length": L0,
        "lengths": list(LENGTHS),
        "items": 400,
        "candidates": 10,
        "chance": CHANCE,
        "unit_count": 20,
        "unit": "haystack",
        "items_hash": "1e" * 32,
        "units": {"kind": "haystack", "names": [str(j) for j in range(20)]},
        "cells": cells,
        "by_depth": spots,
        "by_distance": [],
    }


def attention(methods: list[str], rng: np.random.Generator) -> dict:
    cells = []
    for method in methods:
        for n, length in enumerate((256, 512, 1024)):
            for measure, value in {
                "entropy": 4.0,
                "entropy_relative": 0.7,
                "first_token": 0.1 * n,
                "mass_beyond": 0.2 * n,
                "logit_std": 1.5 + 0.2 * n,
                "logit_max": 6.0 + n,
                "reach_90": 200.0 * (n + 1),
            }.items():
                shown = value * (1 + 0.05 * rng.normal())
                where = {
                    "method": method,
                    "length": length,
                    "measure": measure,
                    "low": None,
                    "high": None,
                }
                cells.append({**where, "layer": None, "head": None, "value": shown})
                cells.append({**where, "layer": 0, "head": None, "value": -1e6})  # not to be shown
    return {
        "format": 1,
        "protocol": "attention",
        "trained_length": L0,
        "documents": 12,
        "cells": cells,
    }


def generation(methods: list[str], rng: np.random.Generator) -> dict:
    cells = []
    for method in methods:
        for source, base in (("greedy", 0.5), ("real text", 0.02)):
            for n, (start, stop) in enumerate(((128, 256), (256, 512), (512, 1024))):
                for measure, value in {"repeated_4": base + 0.1 * n, "nll": 2.0 + n}.items():
                    where = {
                        "method": method,
                        "source": source,
                        "start": start,
                        "stop": stop,
                        "measure": measure,
                    }
                    cells.append({**where, "value": value, "low": None, "high": None, "rows": 32})
    return {
        "format": 1,
        "protocol": "generation",
        "trained_length": L0,
        "documents": 32,
        "cells": cells,
    }


def position(methods: list[str], rng: np.random.Generator) -> dict:
    buckets = [
        {
            "low": 2**k if k else 0,
            "high": 2 ** (k + 1) if k else 1,
            "count": 2**k,
            "nll": 7.5 - 0.3 * k + 0.01 * rng.normal(),
            "gain": {"estimate": 0.01 * k, "low": None, "high": None},
        }
        for k in range(10)
    ]
    return {
        "format": 1,
        "protocol": "by-position",
        "trained_length": L0,
        "documents": 12,
        "units": {"kind": "document", "names": [], "targets": [], "seen": None},
        "cells": [],
        "by_position": dict.fromkeys(methods, buckets),
    }
