"""Values of arms in expressions, from the cells of results.json of a study."""

from typing import Any

import numpy as np
import pandas as pd

from errors import StudyError
from evaluation.evaluation_settings import tokens_of
from studies.expressions import DEFAULTS


def evaluation_of(cell: dict, value: dict) -> str:
    """The evaluation that a value names, or else the first evaluation of its cell."""
    return value.get("evaluation") or next(iter(cell["evaluations"]))


def unit_values(cell: dict, value: dict) -> pd.DataFrame:
    """A value of an arm by unit, with columns `mean` and `targets` (number of targets or items). A
    read gain covers all distances from `distance` on. Raises StudyError if the value was not
    measured."""
    asked = DEFAULTS | value
    metric = asked["metric"]
    name = evaluation_of(cell, value)
    record = cell["evaluations"][name]
    trained_length = cell["training"]["train_length"]

    def is_asked(row: dict) -> bool:
        length = row["length"] if asked["length"] is None else asked["length"]
        place = (asked["method"], tokens_of(length, trained_length))
        return (row["method"], row["length"]) == place

    if metric == "read_gain":
        least = tokens_of(value.get("distance", 0), trained_length)
        parts = [
            {
                "unit": row["units"],
                "mean": np.subtract(row["unit_control_nll"], row["unit_nll"]),
                "targets": row["unit_targets"],
            }
            for row in record["repeated"]["cells"]
            if is_asked(row) and row["distance_low"] >= least
        ]
    else:
        units = record.get("units", {})
        rows = filter(is_asked, record.get("cells", ()))
        means: list[Any] = [row.get(f"unit_{metric}") or [row.get(metric)] for row in rows]
        parts = []
        for own in [each for each in means if None not in each][:1]:
            counts = units.get("targets") or units.get("items") or [1] * len(own)
            names = units.get("names") or range(len(counts))
            mean = np.broadcast_to(own, len(counts))
            parts.append({"unit": names, "mean": mean, "targets": counts})
    if not parts:
        raise StudyError(f"{cell['id']}: evaluation {name} did not measure {value}")
    table = pd.concat(map(pd.DataFrame, parts))
    table["mean"] *= table["targets"]
    sums = table.groupby("unit")[["mean", "targets"]].agg("sum")
    return sums.assign(mean=sums["mean"] / sums["targets"])


def mean_of(units: pd.DataFrame) -> float:
    """The mean of `unit_values` over all targets."""
    return float(np.average(units["mean"], weights=units["targets"]))


def means_without_unit(units: pd.DataFrame) -> np.ndarray:
    """(D,) for each unit, the mean over the targets of all other units."""
    sums = (units["mean"] * units["targets"]).to_numpy()
    counts = units["targets"].to_numpy()
    return (sums.sum() - sums) / np.maximum(counts.sum() - counts, 1)
