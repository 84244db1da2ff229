"""results.json of a study as arrays: the NLL of every variant, length, seed and unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evaluation.comparable import comparable
from evaluation.errors import EvaluationError
from evaluation.scoring.methods import TRAINED
from studies.errors import StudyError

SEED = "seed"  # the axis that repeats a scheme
TOLERANCE, CONFIDENCE = 0.02, 0.95  # defaults: nats, and the simultaneous level of intervals
LOSSES = ("fixed-targets", "sliding", "non-overlapping")  # protocols with the loss of units by length
Group = tuple[tuple[str, str], ...]  # labels on the axes other than the scheme and the seed
# Facts that all results of a comparison must share besides their targets; others are excluded.
SHARED = ("trained_length", "dtype")


@dataclass(frozen=True)
class StoredCell:
    """One training run with its evaluations, finished or not. `group`: its labels on the axes other than the
    scheme and the seed."""

    id: str
    scheme: str
    seed: str
    group: Group
    record: dict

    @property
    def finished(self) -> bool:
        return self.record["status"] == "done"


@dataclass(frozen=True)
class StudyVariant:
    """One row of the report: the runs of a scheme under one context-extension method."""

    name: str
    scheme: str
    method: str = TRAINED


@dataclass(frozen=True)
class StoredStudy:
    """A results file: its cells and variants in the order of the study. `declared`: its report settings."""

    name: str
    cells: list[StoredCell]
    variants: list[StudyVariant]
    groups: list[Group]
    declared: dict[str, Any]
    record: dict

    @property
    def baseline(self) -> str | None:
        """The variant that the others are compared with."""
        names = [variant.name for variant in self.variants]
        wanted = self.declared.get("baseline")
        if wanted is not None and wanted not in names:
            raise StudyError(f"report.baseline={wanted} is not a variant of the study: {', '.join(names)}")
        return wanted or (names[0] if names else None)

    def of(self, variant: StudyVariant, group: Group) -> list[StoredCell]:
        return [cell for cell in self.cells if (cell.scheme, cell.group) == (variant.scheme, group)]


def read_study(results: dict) -> StoredStudy:
    """Raises StudyError if `results` is not a valid results file."""
    if results.get("format") != 1 or "cells" not in results:
        raise StudyError(
            f"not a results file of a study: format {results.get('format')!r}, expected 1; run study.py again"
        )
    study = results.get("study") or {}
    declared = dict(study.get("report") or {})
    axes = list(dict.fromkeys(axis for cell in results["cells"] for axis in cell["axes"]))
    others = [axis for axis in axes if axis != SEED]
    by = "scheme" if "scheme" in others else next(iter(others), None)
    cells = [
        StoredCell(
            id=record["id"],
            scheme=record["axes"].get(by, results.get("name", "all")) if by else results.get("name", "all"),
            seed=record["axes"].get(SEED, "0"),
            group=tuple((axis, at) for axis, at in record["axes"].items() if axis not in (by, SEED)),
            record=record,
        )
        for record in results["cells"]
    ]
    schemes = list(dict.fromkeys(cell.scheme for cell in cells))
    declared_variants = study.get("variants") or {}
    variants = []
    for scheme in schemes:
        own = {name: one for name, one in declared_variants.items() if one["scheme"] == scheme}
        if not any(one.get("method", TRAINED) == TRAINED for one in own.values()):
            own = {scheme: {}} | own
        variants += [StudyVariant(name, scheme, one.get("method", TRAINED)) for name, one in own.items()]
    unknown = [
        f"{name} (scheme {one['scheme']})"
        for name, one in declared_variants.items()
        if one["scheme"] not in schemes
    ]
    if unknown:
        raise StudyError(f"variants: schemes not in the grid: {', '.join(unknown)}")
    groups = list(dict.fromkeys(cell.group for cell in cells))
    return StoredStudy(results.get("name", "study"), cells, variants, groups, declared, results)


@dataclass
class StudyLosses:
    """The losses of one evaluation in one group of cells.

    Attributes:
        facts: protocol, corpus, hashes and other facts from the evaluation of the first cell.
        nll: by (variant, length) and seed, (D,) mean NLL of each unit.
        pooled: by (variant, length) and seed: (mean NLL over all targets, bits per byte or None).
        reference: by variant and seed, (D,) NLL as trained at the training length.
        missing: by (variant, length): why there is no number. If one seed has none, the other seeds are
            dropped as well, because a mean over the successful seeds only would be biased.
        failed: entries of `missing` that could have been measured; they count in the family of comparisons.
        rounding: by variant, the largest mean difference of bfloat16 from float32 in nats.
        excluded: cells whose results are not comparable, and why.
    """

    name: str
    group: Group
    variants: list[StudyVariant]
    facts: dict
    lengths: list[int]
    kind: str
    units: list[str]
    targets: np.ndarray
    seen: np.ndarray
    unigram: np.ndarray | None = None
    nll: dict[tuple[str, int], dict[str, np.ndarray]] = field(default_factory=dict)
    pooled: dict[tuple[str, int], dict[str, tuple[float, float | None]]] = field(default_factory=dict)
    reference: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    missing: dict[tuple[str, int], str] = field(default_factory=dict)
    failed: set[tuple[str, int]] = field(default_factory=set)
    rounding: dict[str, float] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)

    @property
    def trained_length(self) -> int:
        return self.facts["trained_length"]


def evaluations_of(study: StoredStudy) -> list[str]:
    """Names of all evaluations in the order of the study, the primary one first."""
    found = dict.fromkeys(name for cell in study.cells for name in cell.record.get("evaluations") or {})
    names = [name for name in (study.record.get("study") or {}).get("evaluations") or {} if name in found]
    names += [name for name in found if name not in names]
    wanted = study.declared.get("primary")
    if wanted in names:
        names = [wanted, *(name for name in names if name != wanted)]
    return names


def read_losses(study: StoredStudy, name: str, group: Group) -> StudyLosses | None:
    """The losses of one evaluation in one group; None if it has another protocol or no results."""
    found: StudyLosses | None = None
    first: tuple[str, dict] = ("", {})
    for variant in study.variants:
        for cell in study.of(variant, group):
            result = (cell.record.get("evaluations") or {}).get(name)
            if not result or result.get("protocol") not in LOSSES:
                continue
            if not isinstance(result.get("units"), dict):
                if found is not None:
                    found.excluded[cell.id] = "its results have no losses by unit; evaluate it again"
                continue
            if found is None:
                found, first = _empty(study, name, group, result), (cell.id, result)
            if differing := _differing(first, (cell.id, result)):
                found.excluded[cell.id] = differing
                continue
            _add(found, variant, cell, result)
    if found is not None:
        _leave_out_failed(found)
    return found


def _differing(first: tuple[str, dict], other: tuple[str, dict]) -> str:
    """Why two results cannot be compared, '' if they can."""
    try:
        comparable(dict((first, other)))
    except EvaluationError as error:
        return str(error)
    wrong = [key for key in SHARED if first[1].get(key) != other[1].get(key)]
    wrong += ["units"] if first[1]["units"]["names"] != other[1]["units"]["names"] else []
    return f"{', '.join(wrong)} differs from {first[0]}" if wrong else ""


def _leave_out_failed(losses: StudyLosses) -> None:
    """Drop all seeds of a (variant, length) for which one seed has no number."""
    for where in losses.missing:
        if measured := losses.nll.pop(where, None):
            losses.pooled.pop(where)
            losses.failed.add(where)
            losses.missing[where] += f" (measured for seed {', '.join(measured)})"


def _empty(study: StoredStudy, name: str, group: Group, result: dict) -> StudyLosses:
    units = result["units"]
    unigram = result.get("unigram_unit_nll")
    return StudyLosses(
        name=name,
        group=group,
        variants=study.variants,
        facts={key: value for key, value in result.items() if key not in ("cells", "units", "summary")},
        lengths=list(result["lengths"]),
        kind=units["kind"],
        units=list(units["names"]),
        targets=np.array(units["targets"], dtype=np.int64),
        seen=np.array(units.get("seen") or [False] * len(units["names"]), dtype=bool),
        unigram=None if unigram is None else np.array(unigram, dtype=np.float64),
    )


def _add(losses: StudyLosses, variant: StudyVariant, cell: StoredCell, result: dict) -> None:
    for row in result["cells"]:
        where = (variant.name, row["length"])
        values = row.get("unit_nll")
        if row["method"] == TRAINED and row["length"] == losses.trained_length and values is not None:
            losses.reference.setdefault(variant.name, {})[cell.seed] = np.array(values, dtype=np.float64)
        if row["method"] in (variant.method, TRAINED):  # verdicts compare with `trained`
            off = abs(row.get("bfloat16_minus_float32") or 0.0)
            losses.rounding[variant.name] = max(off, losses.rounding.get(variant.name, 0.0))
        if row["method"] != variant.method:
            continue
        if values is None:
            losses.missing[where] = row.get("failure") or "no number"
            if row.get("exists"):
                losses.failed.add(where)
            continue
        losses.nll.setdefault(where, {})[cell.seed] = np.array(values, dtype=np.float64)
        losses.pooled.setdefault(where, {})[cell.seed] = (row["nll"], row.get("bits_per_byte"))
