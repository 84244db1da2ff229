"""results.json of an evaluation of the loss of text."""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from pydantic import TypeAdapter

from evaluation.methods import TRUNCATE, name_of
from evaluation.reports.report import basis
from evaluation.scoring.text_loss import LossMeasurement
from evaluation.statistics.intervals import (
    interval_columns,
    interval_over_units,
    unit_counts,
    unit_means,
)
from evaluation.statistics.loss_verdicts import ROUNDING
from evaluation.statistics.results_table import ResultRow, number
from model import AnyPosition

_POSITION = TypeAdapter(AnyPosition)


def record_of(measurement: LossMeasurement) -> dict:
    """The content of results.json of one run, except for the family of its verdicts."""
    ids, counts = np.unique(measurement.unit, return_counts=True)

    def by_unit(nll: np.ndarray | None) -> list[float] | None:
        """Mean NLL of each unit in the order of `units`."""
        return None if nll is None else unit_means(nll, measurement.unit).tolist()

    dtype = measurement.settings.dtype
    cells = []
    for method in measurement.methods:
        for length in measurement.plan.lengths:
            where = (method.label, length)
            nll = measurement.nll.get(where)
            reason = measurement.absent.get(where) or measurement.failed.get(where)
            rounding = {}
            if where in measurement.rounding_error:
                rounding[f"{dtype}_minus_float32"] = measurement.rounding_error[where]
            if nll is not None or reason:
                cells.append({
                    "method": method.label,
                    "length": length,
                    "nll": None if nll is None else float(nll.mean()),
                    "bits_per_byte": bits_per_byte(nll, measurement.n_bytes),
                    **dict.fromkeys(ROUNDING),
                    **rounding,
                    "failure": reason,
                    "scheme": describe_scheme(measurement, method.label, length),
                    "exists": where not in measurement.absent,
                    "unit_nll": by_unit(nll),
                })  # fmt: skip
    record = {
        **basis(measurement),
        "targets": len(measurement.document),
        "documents": len(np.unique(measurement.document)),
        "unit": measurement.unit_kind,
        "tolerance": measurement.settings.tolerance,
        "bos": measurement.settings.bos,
        "targets_hash": measurement.plan.hash,
        "lengths": measurement.plan.lengths,
        "left_out": measurement.left_out,
        "contamination": measurement.screening.record,
        "units": {
            "kind": measurement.unit_kind,
            "names": [measurement.unit_names[i] for i in ids],
            "targets": counts.tolist(),
        },
        "unigram_nll": measurement.unigram_mean,
        "unigram_unit_nll": by_unit(measurement.unigram),
        "truncated_nll": measurement.truncated_mean,
        "truncated_unit_nll": by_unit(measurement.truncated_nll),
        "cells": cells,
        "by_position": by_position(measurement),
        "per_target_nll": measurement.files,
    }
    if repeats := measurement.plan.repeats:
        gains = list(read_gains(measurement))
        record["repeated"] = {"hash": repeats.hash, "ngram": repeats.ngram, "cells": gains}
    return record


def comparison_record(runs: Mapping[str, LossMeasurement]) -> dict:
    """The content of results.json of several runs."""
    first, *_ = runs.values()
    return {
        **first.facts,
        "protocol": first.plan.protocol,
        "trained_length": first.subject.trained_length,
        "dtype": first.settings.dtype,
        "targets_hash": first.plan.hash,
        "targets": len(first.document),
        "runs": [
            {
                "run": run.subject.name,
                "step": run.subject.step,
                "checkpoint_hash": run.subject.checkpoint_hash,
                "train_length": run.subject.trained_length,
            }
            for run in runs.values()
        ],
    }


def bits_per_byte(nll: np.ndarray | None, n_bytes: int | None) -> float | None:
    """Sum of NLL / ln 2 / bytes of the targets' raw text; None if NLL or bytes are unknown."""
    return None if nll is None or not n_bytes else float(nll.sum()) / math.log(2) / n_bytes


def describe_scheme(measurement: LossMeasurement, label: str, length: int) -> str:
    """The scheme as evaluated at this length: `rope, yarn factor 4 (auto)`."""
    if label == TRUNCATE:
        length = measurement.subject.trained_length
    record = measurement.schemes[label]
    schemes = record["kinds"].values() if "kinds" in record else [record]
    parts = [
        _POSITION.validate_python(scheme).describe(length, measurement.subject.original_length)
        for scheme in schemes
    ]
    tail = f", context truncated to {length}" if label == TRUNCATE else ""
    return " | ".join(parts) + tail


def by_position(measurement: LossMeasurement) -> dict[str, list[dict]]:
    """NLL of each method by position in geometric buckets {0}, [2^k, 2^(k+1)), up to the last
    position, and the gain over truncation, paired by target. Empty for other protocols, and if the
    baseline has failed."""
    if measurement.plan.protocol != "by-position" or measurement.truncated_nll is None:
        return {}
    ((length, windows),) = measurement.plan.windows.items()
    position = np.tile(np.arange(length), len(windows))[measurement.screening.kept]
    exponents = np.frexp(position)[1]  # exponents of the powers of two above the positions
    buckets: dict[str, list[dict]] = {}
    for (method, _), nll in measurement.nll.items():
        for k in np.unique(exponents).tolist():
            inside = exponents == k
            gains = (measurement.truncated_nll - nll)[inside]
            alpha = 1 - measurement.settings.confidence
            gain = interval_over_units(gains, measurement.unit[inside], alpha=alpha)
            bucket = {
                "low": 2**k // 2,
                "high": min(2**k, length),
                "count": int(inside.sum()),
                "nll": float(nll[inside].mean()),
                "gain": {"estimate": gain.value, "low": gain.low, "high": gain.high},
            }
            buckets.setdefault(method, []).append(bucket)
    return buckets


def read_gains(measurement: LossMeasurement) -> Iterator[dict]:
    """The cell of results.json for each method, length and octave of distances [2^k, 2^(k+1));
    intervals over units, paired by target.

    readable: number of targets whose earlier occurrence is among the inputs; nll, control_nll: NLL
    before and after the earlier occurrence was replaced, means over targets and over those of each
    unit; read_gain: control NLL − NLL, the gain from reading at this distance.
    """
    targets = measurement.plan.repeats
    if targets is None:
        return
    units = measurement.units[np.repeat(targets.document, targets.keep)]
    octave = np.frexp(targets.target_distances())[1]
    for (method, length), losses in measurement.repeated.items():
        inputs = measurement.subject.trained_length if method == TRUNCATE else length
        readable = targets.is_readable(inputs)
        for k in np.unique(octave).tolist():
            here = octave == k
            unit = units[here]
            nll = losses[here]
            control = measurement.control[method, length][here]
            alpha = 1 - measurement.settings.confidence
            gain = interval_over_units(control - nll, unit, alpha=alpha)
            yield {
                "method": method,
                "length": length,
                "targets": len(nll),
                "nll": float(nll.mean()),
                "distance_low": 2**k // 2,
                "distance_high": 2**k,
                "readable": int(readable[here].sum()),
                "control_nll": float(control.mean()),
                **interval_columns("read_gain", gain),
                "units": [measurement.unit_names[each] for each in np.unique(unit)],
                "unit_targets": unit_counts(unit).tolist(),
                "unit_nll": unit_means(nll, unit).tolist(),
                "unit_control_nll": unit_means(control, unit).tolist(),
            }


def position_rows(record: dict) -> Iterator[ResultRow]:
    """The rows of the table of results for the entry `by_position` of a record."""
    for method, buckets in record["by_position"].items():
        for bucket in buckets:
            name = name_of(method)
            at = bucket["low"]
            until = bucket["high"]
            yield ResultRow(name, "nll_at_positions", bucket["nll"], at=at, until=until)
            gain = bucket["gain"]
            yield ResultRow(
                variant=name,
                metric="gain_at_positions",
                value=gain["estimate"],
                at=at,
                until=until,
                low=number(gain.get("low")),
                high=number(gain.get("high")),
            )
