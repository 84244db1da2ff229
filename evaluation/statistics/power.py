"""How many seeds or units are needed to detect a difference of a given size, from existing results.

Reads results.json of evaluations, and of studies, whose cells hold evaluations.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from errors import EvaluationError
from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.statistics.intervals import MANY_UNITS, MeanInterval, interval, units_needed
from evaluation.statistics.seeds import SeedInterval, change, compare, needed


@dataclass(frozen=True)
class PowerInputs:
    """One scheme: all its seeds in one evaluation on the same targets.

    tables: (method, length) -> mean NLL (S, D) by seed and unit, of the cells that every seed has.
    """

    name: str  # of the scheme
    trained_length: int
    unit_kind: str
    tables: dict[tuple[str, int], np.ndarray]


@dataclass(frozen=True)
class RequiredSamples:
    """The seeds and units of one comparison at a cell, and the numbers it requires."""

    comparison: str
    method: str
    length: int
    now: MeanInterval
    seeds: tuple[int, ...]  # of each scheme
    more_units: int | None  # with these seeds; None: no number is enough
    more_seeds: int | None  # with these units


def half_to_detect(
    difference: float, power: float = 0.8, *, alpha: float = 0.05, family: int = 1
) -> float:
    """The half-width whose interval leaves out zero with probability `power` where the true
    difference is this one; at power 0.5 the difference itself. Raises EvaluationError if there is
    no such half-width.
    """
    if not (math.isfinite(difference) and difference > 0):
        raise EvaluationError(
            f"the difference must be a finite number of nats above 0, got {difference}"
        )
    if not 0.5 <= power < 1:
        raise EvaluationError(f"power={power} is out of range; choose 0.5 or more, and less than 1")
    normal = NormalDist().inv_cdf
    return difference / (1 + normal(power) / normal(1 - alpha / family / 2))


def read_measured(paths: Sequence[Path], evaluation: str | None = None) -> list[PowerInputs]:
    """The schemes of these files. Evaluations of one scheme and trained length are its seeds.

    Raises EvaluationError for a file that holds no such results, for results on other targets, and
    for a study with several evaluations of which none is named.
    """
    documents = [row for path in paths for row in _documents(Path(path), evaluation)]
    if not documents:
        raise EvaluationError(f"{', '.join(map(str, paths))}: no finished evaluation yet")
    _, origin, first = documents[0]
    schemes: dict[str, list[dict]] = {}
    for name, source, document in documents:
        if any(document[key] != first[key] for key in ("targets_hash", "units")):
            raise EvaluationError(
                f"{source} and {origin} were measured on other targets; evaluate both with the "
                "same settings on the same corpus"
            )
        schemes.setdefault(name, []).append(document)
    return [
        PowerInputs(name, seeds[0]["trained_length"], first["units"]["kind"], _tables(seeds))
        for name, seeds in schemes.items()
    ]


def _tables(documents: list[dict]) -> dict[Any, np.ndarray]:
    """Mean NLL (S, D) by (method, length), of the cells that every document has."""
    cells = pd.DataFrame([cell for document in documents for cell in document["cells"]])
    cells = cells[cells["unit_nll"].notna() & (cells["method"] != TRUNCATE)]
    return {
        cell: np.array(seeds.tolist())
        for cell, seeds in cells.groupby(["method", "length"], sort=False)["unit_nll"]
        if len(seeds) == len(documents)
    }


def _documents(path: Path, evaluation: str | None) -> list[tuple[str, str, dict]]:
    """(scheme, location, results of an evaluation) of one file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cells = content["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"{path} is not the results.json of an evaluation or a study ({error})"
        ) from error
    if "study" not in content:
        if "units" not in content or not cells or "unit_nll" not in cells[0]:
            raise EvaluationError(
                f"{path} has no numbers by unit; run evaluate.py with its settings.yaml again "
                "(measured cells are reused)"
            )
        return [(_scheme(content), str(path), content)]
    documents = []
    for cell in cells:
        measured = {
            name: document
            for name, document in cell["evaluations"].items()
            if "unit_nll" in (document.get("cells") or [{}])[0] and evaluation in (None, name)
        }
        if len(measured) > 1:
            raise EvaluationError(
                f"{path} contains the evaluations {', '.join(measured)}; choose one with "
                "--evaluation NAME"
            )
        axes = [f"{axis}={value}" for axis, value in cell["axes"].items() if axis != "seed"]
        for document in measured.values():
            name = ",".join(axes) or _scheme(document)
            documents.append((name, f"{path}, cell {cell['id']}", document))
    return documents


def _scheme(content: dict) -> str:
    method = next((c for c in content["cells"] if c["method"] == TRAINED), content["cells"][0])
    return f"{method['scheme']} ({content['trained_length']})"


def needs(
    schemes: Sequence[PowerInputs],
    difference: float,
    *,
    power: float = 0.8,
    alpha: float = 0.05,
    family: int = 1,
) -> list[RequiredSamples]:
    """The requirements of every comparison: each cell against as trained at L0 of the same scheme,
    and each scheme against the first one at the same cell."""
    half = half_to_detect(difference, power, alpha=alpha, family=family)
    rows = []

    def add(comparison: str, cell: tuple[str, int], gap: SeedInterval) -> None:
        more_seeds, more_units = needed(gap, half)
        rows.append(RequiredSamples(comparison, *cell, gap, gap.seeds, more_units, more_seeds))

    for scheme in schemes:
        base = (TRAINED, scheme.trained_length)
        for cell, table in scheme.tables.items():
            if base not in scheme.tables or cell == base:
                continue
            name = f"{scheme.name}: {cell[0]} against {TRAINED} at {scheme.trained_length}"
            paired = table - scheme.tables[base]
            if len(paired) > 1:
                add(name, cell, change(paired, alpha=alpha, family=family))
                continue
            # of this one checkpoint
            gap = interval(paired[0], alpha=alpha, family=family)
            more = MANY_UNITS
            if gap.units > 1:
                more = units_needed(gap.sd, half, alpha=alpha / family)
            enough = more if more < MANY_UNITS else None
            rows.append(RequiredSamples(name, *cell, gap, (1,), enough, None))
    first = schemes[0]
    for scheme in schemes[1:]:
        for cell, table in scheme.tables.items():
            if cell in first.tables:
                gap = compare(table, first.tables[cell], alpha=alpha, family=family)
                add(f"{scheme.name} against {first.name}: {cell[0]}", cell, gap)
    return rows
