"""results.json of a study: its cells, its variants and what the report declares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import read_object
from errors import StudyError
from evaluation.scoring.methods import TRAINED

RESULTS = "results.json"
# the axis that is compared, and the axis that repeats it
SCHEME = "scheme"
SEED = "seed"
# defaults: nats, and the simultaneous level of intervals
TOLERANCE = 0.02
CONFIDENCE = 0.95
Group = tuple[tuple[str, str], ...]  # labels on the axes other than the scheme and the seed


@dataclass(frozen=True)
class StoredCell:
    """One training run with its evaluations, finished or not."""

    id: str
    scheme: str
    seed: str
    group: Group
    record: dict


@dataclass(frozen=True)
class StudyVariant:
    """One row of the report: the runs of a scheme under one context-extension method."""

    name: str
    scheme: str
    method: str = TRAINED


@dataclass(frozen=True)
class StoredStudy:
    """Cells and variants in the order of the study. `declared`: its report settings."""

    name: str
    cells: list[StoredCell]
    variants: list[StudyVariant]
    declared: dict[str, Any]
    record: dict

    @property
    def unfinished(self) -> list[StoredCell]:
        return [cell for cell in self.cells if cell.record["status"] != "done"]

    @property
    def groups(self) -> list[Group]:
        return list(dict.fromkeys(cell.group for cell in self.cells))

    @property
    def baseline(self) -> str | None:
        """The variant that the others are compared with."""
        names = [variant.name for variant in self.variants]
        wanted = self.declared.get("baseline")
        if wanted is not None and wanted not in names:
            raise StudyError(
                f"report.baseline={wanted} is not a variant of the study: {', '.join(names)}"
            )
        return wanted or (names[0] if names else None)

    @property
    def evaluations(self) -> list[str]:
        """Names of all evaluations with results in the order of the study, the primary one first."""
        found = dict.fromkeys(
            name for cell in self.cells for name in cell.record.get("evaluations") or {}
        )
        order = [
            self.declared.get("primary"),
            *((self.record.get("study") or {}).get("evaluations") or {}),
        ]
        return [name for name in dict.fromkeys([*order, *found]) if name in found]

    def results(self, name: str, group: Group) -> list[tuple[StudyVariant, StoredCell, dict]]:
        """The results of an evaluation in a group of cells, for every variant."""
        found = [(variant, cell) for variant in self.variants for cell in self.of(variant, group)]
        every = [(variant, cell, cell.record.get("evaluations") or {}) for variant, cell in found]
        return [
            (variant, cell, results[name]) for variant, cell, results in every if results.get(name)
        ]

    def of(self, variant: StudyVariant, group: Group) -> list[StoredCell]:
        return [cell for cell in self.cells if (cell.scheme, cell.group) == (variant.scheme, group)]


def read_results(folder: Path) -> dict:
    """results.json of a study. Raises StudyError if it does not exist."""
    if not (folder / RESULTS).is_file():
        raise StudyError(f"{folder / RESULTS} does not exist; run the study first")
    return read_object(folder / RESULTS)


def read_study(results: dict) -> StoredStudy:
    """Raises StudyError if `results` is not a valid results file."""
    if results.get("format") != 1 or "cells" not in results:
        raise StudyError(
            f"not a results file of a study: format {results.get('format')!r}, expected 1; run study.py again"
        )
    name = results.get("name", "study")
    study = results.get("study") or {}
    axes = dict.fromkeys(axis for cell in results["cells"] for axis in cell["axes"] if axis != SEED)
    by = SCHEME if SCHEME in axes else next(iter(axes), SCHEME)
    cells = [
        StoredCell(
            id=record["id"],
            scheme=record["axes"].get(by, name),
            seed=record["axes"].get(SEED, "0"),
            group=tuple(
                (axis, label) for axis, label in record["axes"].items() if axis not in (by, SEED)
            ),
            record=record,
        )
        for record in results["cells"]
    ]
    schemes = dict.fromkeys(cell.scheme for cell in cells)
    declared = [
        StudyVariant(label, one["scheme"], one.get("method", TRAINED))
        for label, one in (study.get("variants") or {}).items()
    ]
    if unknown := [
        f"{one.name} (scheme {one.scheme})" for one in declared if one.scheme not in schemes
    ]:
        raise StudyError(f"variants: schemes not in the grid: {', '.join(unknown)}")
    variants = []
    for scheme in schemes:
        own = [one for one in declared if one.scheme == scheme]
        as_trained = (
            [] if any(one.method == TRAINED for one in own) else [StudyVariant(scheme, scheme)]
        )
        variants += as_trained + own
    return StoredStudy(name, cells, variants, dict(study.get("report") or {}), results)


def unfair_comparisons(checks: dict) -> list[str]:
    """Warnings about cells that cannot be compared fairly, one sentence each."""
    lines = []
    for group in checks.get("data_order") or []:
        if not group["agree"]:
            cells = "; ".join(", ".join(names) for names in group["orders"].values())
            lines.append(
                f"Cells of seed {group['seed']} were trained on different batches: {cells}."
            )
    if checks.get("equal_tokens") is False:
        lines.append("The schemes were trained on different numbers of tokens.")
    return lines
