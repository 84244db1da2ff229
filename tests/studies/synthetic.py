"""Synthetic study results: every NLL is drawn around a value that the tests know."""

from __future__ import annotations

import numpy as np

L0 = 256
LENGTHS = (256, 512, 1024, 2048, 4096)
UNIGRAM = 6.6
# NLL at the trained length, and the change against it at each longer length.
TRUTH = {
    "rope": (4.80, (0.10, 0.55, 1.30, 2.10)),
    "none": (4.95, (0.05, 0.40, 0.90, 1.50)),
    "alibi": (4.82, (-0.010, -0.020, -0.025, -0.03)),
    "window": (4.81, (0.0, 0.0, 0.0, 0.0)),
    "learned": (4.90, None),  # no positions beyond the trained length
    "sinusoidal": (4.92, (1.0, 2.5, 3.5, 4.5)),
    "fox": (4.75, (-0.04, -0.06, -0.07, -0.08)),  # one seed only
}
YARN = (0.0, (0.0, 0.12, 0.40, 0.80))  # rope under a method: change at L0 and beyond
ONE_SEED = {"fox"}
FAILED = ("kerple", "0")


def results(
    units: int = 9,
    seeds: int = 3,
    *,
    seed_sd: float = 0.004,
    unit_sd: float = 0.15,
    noise: float = 0.004,
    seen: int = 0,
    draw: int = 0,
    schemes: tuple[str, ...] = tuple(TRUTH),
) -> dict:
    """A results file: unit effects are common to all schemes, seed effects to all lengths of a run, and each
    change has noise of its own by seed and by unit."""
    rng = np.random.default_rng(draw)
    of_unit = rng.normal(0, unit_sd, units)
    cells = []
    for scheme in schemes:
        base, change = TRUTH[scheme]
        drift = rng.normal(0, noise, (len(LENGTHS), units))
        for seed in range(1 if scheme in ONE_SEED else seeds):
            level = base + of_unit + rng.normal(0, seed_sd)
            trained = {L0: level}
            for n, length in enumerate(LENGTHS[1:], start=1):
                if change is not None:
                    own = rng.normal(0, noise) + drift[n] + rng.normal(0, noise / 4, units)
                    trained[length] = level + change[n - 1] + own
            methods = {"trained": trained}
            if scheme == "rope":
                methods["yarn"] = {
                    length: level + shift + (rng.normal(0, noise) + drift[n] if n else 0.0)
                    for n, (length, shift) in enumerate(
                        zip(LENGTHS, (YARN[0], *YARN[1]), strict=True)
                    )
                }
            cells.append(
                _done(scheme, seed, {"long": evaluation(methods, of_unit, seen)}, len(cells))
            )
    cells.append(
        {
            "id": f"scheme={FAILED[0]},seed={FAILED[1]}",
            "axes": {"scheme": FAILED[0], "seed": FAILED[1]},
            "status": "failed",
            "error": "the loss is not finite at step 17; see logs/scheme=kerple,seed=0.log",
        }
    )
    return {
        "format": 1,
        "name": "synthetic",
        "study": {
            "variants": {"rope + yarn": {"scheme": "rope", "method": "yarn"}},
            "evaluations": {"long": {"overrides": [], "data": None}},
            "report": {
                "baseline": "rope",
                "primary": "long",
                "lengths": [256, 4096],
                "family": None,
                "tolerance": 0.02,
                "confidence": 0.95,
                "pool_seed_variance": False,
            },
        },
        "cells": cells,
    }


def evaluation(
    methods: dict[str, dict[int, np.ndarray]], of_unit: np.ndarray, seen: int = 0
) -> dict:
    """What evaluate.py leaves behind, without what the clock tells."""
    units = len(of_unit)
    targets = [64 * (6 + j % 3) for j in range(units)]
    cells = []
    for method in ("trained", "truncate", *(name for name in methods if name != "trained")):
        for length in LENGTHS:
            nll = methods["trained"][L0] if method == "truncate" else methods[method].get(length)
            row = {"method": method, "scheme": method, "length": length, "failure": None}
            if nll is None:
                row |= {"nll": None, "bits_per_byte": None, "unit_nll": None}
                row["failure"] = "its positions end after 256 tokens"
            else:
                pooled = float(np.average(nll, weights=targets))
                row |= {"nll": pooled, "bits_per_byte": pooled / 2.3, "unit_nll": nll.tolist()}
            cells.append(row)
    return {
        "format": 1,
        "protocol": "fixed-targets",
        "trained_length": L0,
        "lengths": list(LENGTHS),
        "documents": 2 * units,
        "targets": sum(targets),
        "bos": "as-trained",
        "corpus": "long-0123456789/valid",
        "corpus_hash": "c0" * 32,
        "tokenizer_hash": "70" * 32,
        "targets_hash": "7a" * 32,
        "dtype": "float32",
        "seed": 0,
        "tolerance": 0.02,
        "confidence": 0.95,
        "units": {
            "kind": "cluster",
            "names": [f"Author {chr(65 + j)}" for j in range(units)],
            "targets": targets,
            "seen": [j < seen for j in range(units)],
        },
        "unigram_unit_nll": (UNIGRAM + of_unit).tolist(),
        "cells": cells,
    }


def shown(last: int, slope: float = 0.0) -> dict:
    """What training has shown up to `last` tokens of context, in the form of a study's results."""
    context = [float(n) for n in range(1, last + 1)]
    return {
        "context": context,
        "share": [(1 - slope * (n - 1) / (last + 1)) / last for n in context],
    }


def _done(scheme: str, seed: int, evaluations: dict, index: int) -> dict:
    return {
        "id": f"scheme={scheme},seed={seed}",
        "axes": {"scheme": scheme, "seed": str(seed)},
        "status": "done",
        "error": None,
        "training": {
            "run": f"runs/scheme={scheme},seed={seed}",
            "tokens": 2_048_000,
            "steps": 2000,
            "parameters": 1_245_000 + 97 * index,
            "flops_per_token": 8.1e6,
            "flops": 1.66e13,
            "loss": 4.6 + 0.01 * index,
            "checkpoint_hash": f"{index:02x}" * 32,
            "data_hash": f"{seed:02x}" * 32,
            "train_length": L0,
            "position": {"name": scheme},
            "exposure": {
                "tokens": 2_048_000,
                "positions": shown(L0),
                "distances": shown(64 if scheme == "window" else L0, slope=1.0),
            },
        },
        "timing": {
            "seconds": 300.0 + index,
            "tokens_per_second": 6000.0 - 10 * index,
            "peak_memory_bytes": 9.0e8,
            "machine": {"processor": "AMD EPYC", "cores": 2, "threads": 1, "gpus": []},
        },
        "evaluations": evaluations,
    }
