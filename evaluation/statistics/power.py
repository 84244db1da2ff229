"""How many seeds or units are needed to detect a difference of a given size, from existing results.

Reads results.json of evaluations, and of studies, whose cells hold evaluations.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from errors import EvaluationError
from evaluation.scoring.methods import TRAINED, TRUNCATE
from evaluation.statistics.intervals import interval, units_needed
from evaluation.statistics.seeds import MANY_UNITS, SeedInterval, change, compare, needed


@dataclass(frozen=True)
class PowerInputs:
    """One scheme: all its seeds in one evaluation on the same targets.

    tables: (method, length) -> mean NLL (S, D) by seed and unit, of the cells that every seed has.
    """

    name: str  # of the scheme
    trained_length: int
    unit_kind: str
    tables: dict[tuple[str, int], np.ndarray]

    @classmethod
    def of_seeds(cls, name: str, documents: Sequence[dict]) -> "PowerInputs":
        """From the results.json of every seed."""
        seeds = [
            {
                (cell["method"], cell["length"]): np.array(cell["unit_nll"])
                for cell in document["cells"]
                if cell["unit_nll"] is not None and cell["method"] != TRUNCATE
            }
            for document in documents
        ]
        shared = [cell for cell in seeds[0] if all(cell in seed for seed in seeds)]
        tables = {cell: np.stack([seed[cell] for seed in seeds]) for cell in shared}
        return cls(
            name,
            documents[0]["trained_length"],
            documents[0]["units"]["kind"],
            tables,
        )


@dataclass(frozen=True)
class RequiredSamples:
    """The seeds and units of one comparison, and the numbers it requires."""

    comparison: str
    length: int
    estimate: float
    half: float  # NaN if no claim can be made
    seeds: tuple[int, ...]
    units: int
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
    documents = [one for path in paths for one in _documents(Path(path), evaluation)]
    if not documents:
        raise EvaluationError(f"{', '.join(map(str, paths))}: no finished evaluation yet")
    _, origin, first = documents[0]
    for _, where, document in documents:
        same = (document["targets_hash"], document["units"]["names"])
        if same != (first["targets_hash"], first["units"]["names"]):
            raise EvaluationError(
                f"{where} and {origin} were measured on other targets; evaluate both with the "
                "same settings on the same corpus"
            )
    groups: dict[str, list[dict]] = {}
    for name, _, document in documents:
        groups.setdefault(name, []).append(document)
    return [PowerInputs.of_seeds(name, group) for name, group in groups.items()]


def _documents(path: Path, evaluation: str | None) -> list[tuple[str, str, dict]]:
    """(scheme, location, results of an evaluation) of one file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(
            f"{path} is not readable JSON ({error}); pass a results.json"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise EvaluationError(f"{path} is not the results.json of an evaluation or a study")
    if "study" not in content:
        cells = content["cells"]
        if "units" not in content or not cells or "unit_nll" not in cells[0]:
            raise EvaluationError(
                f"{path} has no numbers by unit; run evaluate.py with its settings.yaml again "
                "(measured cells are reused)"
            )
        return [(_scheme(content), str(path), content)]
    found = []
    for cell in content["cells"]:
        axes = [f"{axis}={value}" for axis, value in cell["axes"].items() if axis != "seed"]
        own = {
            name: document
            for name, document in cell["evaluations"].items()
            if "unit_nll" in (document.get("cells") or [{}])[0] and evaluation in (None, name)
        }
        if len(own) > 1:
            raise EvaluationError(
                f"{path} contains the evaluations {', '.join(own)}; choose one with --evaluation "
                f"NAME"
            )
        for document in own.values():
            found.append(
                (",".join(axes) or _scheme(document), f"{path}, cell {cell['id']}", document)
            )
    return found


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
    wanted: Callable[[str, int], bool] = lambda method, length: True,
) -> list[RequiredSamples]:
    """The requirements of every comparison: each cell against as trained at L0 of the same scheme,
    and each scheme against the first one at the same cell. `wanted(method, length)` chooses among
    the cells.
    """
    half = half_to_detect(difference, power, alpha=alpha, family=family)
    how = {"alpha": alpha, "family": family}
    found = []
    for scheme in schemes:
        base = (TRAINED, scheme.trained_length)
        for (method, length), table in scheme.tables.items():
            if base not in scheme.tables or (method, length) == base or not wanted(method, length):
                continue
            paired = table - scheme.tables[base]
            name = f"{scheme.name}: {method} against {TRAINED} at {scheme.trained_length}"
            if len(paired) > 1:
                found.append(_need(name, length, change(paired, **how), half))
                continue
            one = interval(
                paired[0],
                resamples=0,
                **how,
            )  # of this one checkpoint
            units = (
                units_needed(one.sd, half, limit=MANY_UNITS, **how) if one.units > 1 else MANY_UNITS
            )
            more = units if units < MANY_UNITS else None
            found.append(
                RequiredSamples(name, length, one.estimate, one.half, (1,), one.units, more, None)
            )
    first = schemes[0]
    for scheme in schemes[1:]:
        for cell, table in scheme.tables.items():
            if cell in first.tables and wanted(*cell):
                name = f"{scheme.name} against {first.name}: {cell[0]}"
                found.append(_need(name, cell[1], compare(table, first.tables[cell], **how), half))
    return found


def _need(
    name: str,
    length: int,
    got: SeedInterval,
    half: float,
) -> RequiredSamples:
    seeds, units = needed(got, half)
    return RequiredSamples(
        name,
        length,
        got.estimate,
        got.half,
        got.seeds,
        got.units,
        units,
        seeds,
    )
