"""What a study left behind, as arrays: the NLL of every variant, length, seed and unit.

Nothing here needs a model or a run: the one `results.json` of a study is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evaluation.comparable import comparable
from evaluation.errors import EvaluationError
from evaluation.rules import TRAINED
from studies.errors import StudyError

SEED = "seed"  # the axis that repeats a scheme
TOLERANCE, CONFIDENCE = 0.02, 0.95  # nats and level, where a study declares no others
LOSSES = ("fixed-targets", "sliding", "non-overlapping")  # protocols with the loss of units by length
Group = tuple[tuple[str, str], ...]  # places on the axes that name neither the scheme nor the seed
# What all results of a comparison have to share beside their targets; those that differ stand apart.
SHARED = ("trained_length", "dtype")


@dataclass(frozen=True)
class Cell:
    """One finished, failed or pending training with its evaluations. `group`: its place on every axis that
    neither names the scheme nor the seed."""

    id: str
    scheme: str
    seed: str
    group: Group
    record: dict

    @property
    def finished(self) -> bool:
        return self.record["status"] == "done"


@dataclass(frozen=True)
class Variant:
    """One line of the report: the runs of a scheme under one rule."""

    name: str
    scheme: str
    rule: str = TRAINED


@dataclass(frozen=True)
class Study:
    """The results file, its cells and variants in the order of the study, and what its report declares."""

    name: str
    cells: list[Cell]
    variants: list[Variant]
    groups: list[Group]
    declared: dict[str, Any]
    record: dict

    @property
    def baseline(self) -> str | None:
        """The variant that the others are measured against."""
        names = [variant.name for variant in self.variants]
        wanted = self.declared.get("baseline")
        if wanted is not None and wanted not in names:
            raise StudyError(f"report.baseline={wanted} is none of the study's variants: {', '.join(names)}")
        return wanted or (names[0] if names else None)

    def of(self, variant: Variant, group: Group) -> list[Cell]:
        return [cell for cell in self.cells if (cell.scheme, cell.group) == (variant.scheme, group)]


def read_study(results: dict) -> Study:
    """Raises StudyError where `results` is not what a study writes."""
    if results.get("format") != 1 or "cells" not in results:
        raise StudyError(
            f"this is no results file of a study (format {results.get('format')!r}, 1 is known); "
            "run study.py again to gather its results"
        )
    study = results.get("study") or {}
    declared = dict(study.get("report") or {})
    axes = list(dict.fromkeys(axis for cell in results["cells"] for axis in cell["axes"]))
    others = [axis for axis in axes if axis != SEED]
    by = "scheme" if "scheme" in others else next(iter(others), None)
    cells = [
        Cell(
            id=record["id"],
            scheme=record["axes"].get(by, results.get("name", "all")) if by else results.get("name", "all"),
            seed=record["axes"].get(SEED, "0"),
            group=tuple((axis, at) for axis, at in record["axes"].items() if axis not in (by, SEED)),
            record=record,
        )
        for record in results["cells"]
    ]
    schemes = list(dict.fromkeys(cell.scheme for cell in cells))
    asked = study.get("variants") or {}
    variants = []
    for scheme in schemes:
        own = {name: one for name, one in asked.items() if one["scheme"] == scheme}
        if not any(one.get("rule", TRAINED) == TRAINED for one in own.values()):
            own = {scheme: {}} | own
        variants += [Variant(name, scheme, one.get("rule", TRAINED)) for name, one in own.items()]
    unknown = [
        f"{name} (scheme {one['scheme']})" for name, one in asked.items() if one["scheme"] not in schemes
    ]
    if unknown:
        raise StudyError(f"variants of schemes that the grid has not: {', '.join(unknown)}")
    groups = list(dict.fromkeys(cell.group for cell in cells))
    return Study(results.get("name", "study"), cells, variants, groups, declared, results)


@dataclass
class Losses:
    """One evaluation of text in one group of cells.

    Attributes:
        facts: what every number rests on, as the evaluation of the first cell states it.
        nll: by (variant, length) and seed, (D,) mean NLL of each unit.
        pooled: by (variant, length) and seed: (mean NLL over all targets, bits per byte or None).
        reference: by variant and seed, (D,) NLL as trained at the trained length.
        missing: by (variant, length): why there is no number. Where the loss of one seed is not finite the
            others' are not read either: a mean over those that went well is of another scheme.
        failed: those of `missing` that could have been measured, and still count among the comparisons.
        rounding: by variant, the largest mean difference of bfloat16 from float32, nats, its reference's too.
        apart: cells whose results are not comparable, and why.
    """

    name: str
    group: Group
    variants: list[Variant]
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
    apart: dict[str, str] = field(default_factory=dict)

    @property
    def trained_length(self) -> int:
        return self.facts["trained_length"]


def evaluations_of(study: Study) -> list[str]:
    """Names of all evaluations in the study's order, the primary one first."""
    found = dict.fromkeys(name for cell in study.cells for name in cell.record.get("evaluations") or {})
    names = [name for name in (study.record.get("study") or {}).get("evaluations") or {} if name in found]
    names += [name for name in found if name not in names]
    wanted = study.declared.get("primary")
    if wanted in names:
        names = [wanted, *(name for name in names if name != wanted)]
    return names


def read_losses(study: Study, name: str, group: Group) -> Losses | None:
    """The losses of one evaluation in one group; None where it measured something else, or nothing yet."""
    found: Losses | None = None
    first: tuple[str, dict] = ("", {})
    for variant in study.variants:
        for cell in study.of(variant, group):
            # A cell that failed later on may have finished this evaluation: what it measured holds.
            result = (cell.record.get("evaluations") or {}).get(name)
            if not result or result.get("protocol") not in LOSSES:
                continue
            if not isinstance(result.get("units"), dict):
                if found is not None:
                    found.apart[cell.id] = "its results hold no losses by unit: evaluate it again"
                continue
            if found is None:
                found, first = _empty(study, name, group, result), (cell.id, result)
            if differing := _differing(first, (cell.id, result)):
                found.apart[cell.id] = differing
                continue
            _add(found, variant, cell, result)
    if found is not None:
        _leave_out_failed(found)
    return found


def stated(label: str, result: dict) -> tuple[str, dict]:
    """A result as `comparable` asks of it: before targets could be dropped all of them were scored."""
    return label, {"scored_hash": result.get("targets_hash")} | result


def _differing(first: tuple[str, dict], other: tuple[str, dict]) -> str:
    """Why two results cannot stand side by side, '' where they can."""
    try:
        comparable(dict(stated(*one) for one in (first, other)))
    except EvaluationError as error:
        return str(error)
    wrong = [key for key in SHARED if first[1].get(key) != other[1].get(key)]
    wrong += ["units"] if first[1]["units"]["names"] != other[1]["units"]["names"] else []
    return f"measured with another {', '.join(wrong)} than {first[0]}" if wrong else ""


def _leave_out_failed(losses: Losses) -> None:
    """Where one seed has no number, none has."""
    for where in losses.missing:
        if measured := losses.nll.pop(where, None):
            losses.pooled.pop(where)
            losses.failed.add(where)
            losses.missing[where] += f" (not so for seed {', '.join(measured)})"


def _empty(study: Study, name: str, group: Group, result: dict) -> Losses:
    units = result["units"]
    unigram = result.get("unigram_unit_nll")
    return Losses(
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


def _add(losses: Losses, variant: Variant, cell: Cell, result: dict) -> None:
    for row in result["cells"]:
        where = (variant.name, row["length"])
        values = row.get("unit_nll")
        if row["rule"] == TRAINED and row["length"] == losses.trained_length and values is not None:
            losses.reference.setdefault(variant.name, {})[cell.seed] = np.array(values, dtype=np.float64)
        if row["rule"] in (variant.rule, TRAINED):  # every verdict is about a difference from `trained`
            off = abs(row.get("bfloat16_minus_float32") or 0.0)
            losses.rounding[variant.name] = max(off, losses.rounding.get(variant.name, 0.0))
        if row["rule"] != variant.rule:
            continue
        if values is None:
            losses.missing[where] = row.get("failure") or "no number"
            if row.get("exists"):
                losses.failed.add(where)
            continue
        losses.nll.setdefault(where, {})[cell.seed] = np.array(values, dtype=np.float64)
        losses.pooled.setdefault(where, {})[cell.seed] = (row["nll"], row.get("bits_per_byte"))
