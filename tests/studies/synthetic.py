"""Synthetic study results: every NLL is drawn around a value that the tests know."""

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
YARN = (0.0, 0.0, 0.12, 0.40, 0.80)  # rope under a method: change at L0 and beyond
ONE_SEED = {"fox"}
FAILED = "kerple"
TASK_LENGTHS = (128, 256, 512, 1024)
CHANCE = 0.1
ACCURACY = {  # of a task at each length, before a unit's own part
    "rope": (0.97, 0.95, 0.30, 0.11),
    "window": (0.96, 0.60, 0.30, 0.15),
    "alibi": (0.9, 0.9, 0.85, 0.8),
}
MEASURES = {"entropy_relative": 0.7, "first_token": 0.1, "logit_std": 1.5, "logit_max": 6.0}


def results(
    units: int = 9,
    seeds: int = 3,
    *,
    noise: float = 0.004,
    schemes: tuple[str, ...] = tuple(TRUTH),
) -> dict:
    """A results file: unit effects are common to all schemes, seed effects to all lengths of a run,
    and each change has noise of its own by seed and by unit."""
    rng = np.random.default_rng(0)
    of_unit = rng.normal(0, 0.15, units)
    cells = []
    for scheme in schemes:
        base, change = TRUTH[scheme]
        drift = rng.normal(0, noise, (len(LENGTHS), units))
        for seed in range(1 if scheme in ONE_SEED else seeds):
            level = base + of_unit + rng.normal(0, 0.004)
            trained = {L0: level}
            for n, length in enumerate(LENGTHS[1:] if change else (), start=1):
                own = rng.normal(0, noise) + drift[n] + rng.normal(0, noise / 4, units)
                trained[length] = level + change[n - 1] + own
            methods = {"trained": trained}
            if scheme == "rope":
                methods["yarn"] = {
                    length: level + YARN[n] + (rng.normal(0, noise) + drift[n] if n else 0.0)
                    for n, length in enumerate(LENGTHS)
                }
            record = {"long": evaluation(methods, of_unit)}
            cells.append(_cell(scheme, seed, "done") | _trained(seed, len(cells)))
            cells[-1]["evaluations"] = record
    cells.append(_cell(FAILED, 0, "failed") | {"error": "the loss is not finite at step 17"})
    report = {"baseline": "rope", "primary": "long", "lengths": [256, 4096]}
    study = {
        "variants": {"rope + yarn": {"scheme": "rope", "method": "yarn"}},
        "evaluations": {"long": {"overrides": [], "data": None}},
        "report": report | {"family": None, "tolerance": 0.02, "confidence": 0.95},
    }
    return {"format": 1, "name": "synthetic", "study": study, "cells": cells}


def evaluation(methods: dict, of_unit: np.ndarray) -> dict:
    """What evaluate.py stores of a loss evaluation."""
    units = len(of_unit)
    targets = [64 * (6 + j % 3) for j in range(units)]
    cells = []
    for method in ("trained", "truncate", *(name for name in methods if name != "trained")):
        for length in LENGTHS:
            nll = methods["trained"][L0] if method == "truncate" else methods[method].get(length)
            row = {"method": method, "length": length, "failure": None}
            if nll is None:
                row |= {"nll": None, "bits_per_byte": None, "unit_nll": None}
                row["failure"] = "its positions end after 256 tokens"
            else:
                pooled = float(np.average(nll, weights=targets))
                row |= {"nll": pooled, "bits_per_byte": pooled / 2.3, "unit_nll": nll.tolist()}
            cells.append(row)
    return {
        "protocol": "fixed-targets",
        "trained_length": L0,
        "lengths": list(LENGTHS),
        "documents": 2 * units,
        "bos": "as-trained",
        "corpus": "long-0123456789/valid",
        "corpus_hash": "c0" * 32,
        "tokenizer_hash": "70" * 32,
        "targets_hash": "7a" * 32,
        "dtype": "float32",
        "tolerance": 0.02,
        "confidence": 0.95,
        "units": {
            "kind": "cluster",
            "names": [f"Author {chr(65 + j)}" for j in range(units)],
            "targets": targets,
        },
        "unigram_unit_nll": (UNIGRAM + of_unit).tolist(),
        "cells": cells,
    }


def _cell(scheme: str, seed: int, status: str) -> dict:
    return {
        "id": f"scheme={scheme},seed={seed}",
        "axes": {"scheme": scheme, "seed": str(seed)},
        "status": status,
        "error": None,
        "training": None,
        "timing": {},
        "evaluations": {},
    }


def _trained(seed: int, index: int) -> dict:
    return {
        "training": {
            "tokens": 2_048_000,
            "steps": 2000,
            "parameters": 1_245_000 + 97 * index,
            "flops_per_token": 8.1e6,
            "flops": 1.66e13,
            "loss": 4.6 + 0.01 * index,
            "checkpoint_hash": f"{index:02x}" * 32,
            "data_hash": f"{seed:02x}" * 32,
        },
        "timing": {
            "seconds": 300.0 + index,
            "tokens_per_second": 6000.0 - 10 * index,
            "peak_memory_bytes": 9.0e8,
            "machine": {"processor": "AMD EPYC", "cores": 2, "threads": 1, "gpus": []},
        },
    }


def with_others(record: dict) -> dict:
    """The same results with four evaluations more in each finished cell of a scheme of ACCURACY."""
    rng = np.random.default_rng(0)
    names = ("passkey", "attention", "generation", "position")
    record["study"]["evaluations"] |= dict.fromkeys(names)
    for cell in record["cells"]:
        scheme = cell["axes"]["scheme"]
        if cell["status"] == "done" and scheme in ACCURACY:
            methods = ["trained", "yarn"] if scheme == "rope" else ["trained"]
            cell["evaluations"] |= {
                "passkey": passkey(ACCURACY[scheme], methods, rng),
                "attention": attention(methods, rng),
                "generation": generation(methods),
                "position": position(methods, rng),
            }
    return record


def passkey(shares: tuple[float, ...], methods: list[str], rng: np.random.Generator) -> dict:
    cells = []
    spots = []
    for method in methods:
        for length, share in zip(TASK_LENGTHS, shares, strict=True):
            units = np.clip(share + rng.normal(0, 0.02, 20), 0, 1)
            place = {"method": method, "length": length}
            mean = float(units.mean())
            cells.append({**place, "unit_accuracy": units.tolist(), "exact": mean / 2})
            for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
                right = {"share": share * (0.8 + 0.2 * depth), "n": 80}
                spots.append({**place, "where": depth, "share": right})
    return {
        "protocol": "tasks",
        "task": "passkey",
        "trained_length": L0,
        "items": 400,
        "chance": CHANCE,
        "items_hash": "1e" * 32,
        "cells": cells,
        "by_depth": spots,
    }


def attention(methods: list[str], rng: np.random.Generator) -> dict:
    cells = []
    for method in methods:
        for n, length in enumerate((256, 512, 1024), start=1):
            for measure, value in MEASURES.items():
                place = {"method": method, "length": length, "measure": measure, "head": None}
                number = n * value * (1 + 0.05 * rng.normal())
                cells.append({**place, "layer": None, "value": number})
                cells.append({**place, "layer": 0, "value": -1e6})  # not to be shown
    return {"protocol": "attention", "trained_length": L0, "documents": 12, "cells": cells}


def generation(methods: list[str]) -> dict:
    cells = []
    for method in methods:
        for source, base in (("greedy", 0.5), ("real text", 0.02)):
            for n, (start, stop) in enumerate(((128, 256), (256, 512), (512, 1024))):
                place = {"method": method, "source": source, "start": start, "stop": stop}
                for measure, value in {"repeated_4": base + 0.1 * n, "nll": 2.0 + n}.items():
                    cells.append({**place, "measure": measure, "value": value})
    return {"protocol": "generation", "trained_length": L0, "documents": 32, "cells": cells}


def position(methods: list[str], rng: np.random.Generator) -> dict:
    buckets = [
        {
            "low": 2**k if k else 0,
            "high": 2 ** (k + 1) if k else 1,
            "nll": 7.5 - 0.3 * k + 0.01 * rng.normal(),
            "gain": {"estimate": 0.01 * k},
        }
        for k in range(10)
    ]
    return {
        "protocol": "by-position",
        "trained_length": L0,
        "documents": 12,
        "cells": [],
        "by_position": dict.fromkeys(methods, buckets),
    }
