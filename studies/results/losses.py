"""The losses of one evaluation as arrays: the NLL of every variant, length, seed and unit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from errors import EvaluationError
from evaluation.comparable import comparable
from evaluation.scoring.methods import TRAINED
from studies.results.stored import Group, StoredCell, StoredStudy, StudyVariant

# protocols with the loss of units by length
LOSSES = ("fixed-targets", "sliding", "non-overlapping")
# must be equal besides the targets; other results are excluded
SHARED = ("trained_length", "dtype")


@dataclass
class StudyLosses:
    """The losses of one evaluation in one group of cells.

    Attributes:
        facts: protocol, corpus, hashes and other facts from the evaluation of the first cell.
        nll: by (variant, length) and seed, (D,) mean NLL of each unit.
        pooled: by (variant, length) and seed: (mean NLL over all targets, bits per byte or None).
        reference: by variant and seed, (D,) NLL as trained at the trained length.
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
    kind: str
    units: list[str]
    targets: np.ndarray
    seen: np.ndarray
    unigram: float | None
    nll: dict[tuple[str, int], dict[str, np.ndarray]] = field(default_factory=dict)
    pooled: dict[tuple[str, int], dict[str, tuple[float, float | None]]] = field(
        default_factory=dict
    )
    reference: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    missing: dict[tuple[str, int], str] = field(default_factory=dict)
    failed: set[tuple[str, int]] = field(default_factory=set)
    rounding: dict[str, float] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)

    @property
    def trained_length(self) -> int:
        return self.facts["trained_length"]

    @property
    def lengths(self) -> list[int]:
        return self.facts["lengths"]

    @property
    def longer(self) -> list[int]:
        """The lengths beyond the trained length."""
        return [length for length in self.lengths if length > self.trained_length]

    def seeds(self, name: str, length: int) -> tuple[str, ...]:
        """The seeds measured at this length and as trained at the trained length."""
        reference = self.reference.get(name, {})
        return tuple(seed for seed in self.nll.get((name, length), {}) if seed in reference)

    def shift(self, name: str, length: int) -> np.ndarray:
        """(S, D) NLL at this length minus NLL as trained at the trained length."""
        seeds = self.seeds(name, length)
        return stacked(self.nll[name, length], seeds) - stacked(self.reference[name], seeds)


def stacked(by_seed: dict[str, np.ndarray], seeds: tuple[str, ...] | None = None) -> np.ndarray:
    """(S, D) in the given order of seeds."""
    return np.stack([by_seed[seed] for seed in (by_seed if seeds is None else seeds)])


def read_losses(study: StoredStudy, name: str, group: Group) -> StudyLosses | None:
    """The losses of one evaluation in one group; None if it has another protocol or no results."""
    found: StudyLosses | None = None
    first: tuple[str, dict] = ("", {})
    for variant, cell, result in study.results(name, group):
        if result.get("protocol") not in LOSSES:
            continue
        if not isinstance(result.get("units"), dict):
            if found is not None:
                found.excluded[cell.id] = "its results have no losses by unit; evaluate it again"
            continue
        if found is None:
            found = _empty(study, name, group, result)
            first = (cell.id, result)
        if differing := _differing(first, (cell.id, result)):
            found.excluded[cell.id] = differing
        else:
            _add(found, variant, cell, result)
    if found is None:
        return None
    for where in found.missing:
        if measured := found.nll.pop(where, None):
            found.failed.add(where)
            found.missing[where] += f" (measured for seed {', '.join(measured)})"
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


def _empty(study: StoredStudy, name: str, group: Group, result: dict) -> StudyLosses:
    units = result["units"]
    unigram = result.get("unigram_unit_nll")
    return StudyLosses(
        name=name,
        group=group,
        variants=study.variants,
        facts={
            key: value for key, value in result.items() if key not in ("cells", "units", "summary")
        },
        kind=units["kind"],
        units=list(units["names"]),
        targets=np.array(units["targets"], dtype=np.int64),
        seen=np.array(units.get("seen") or [False] * len(units["names"]), dtype=bool),
        unigram=None if unigram is None else float(np.mean(unigram, dtype=np.float64)),
    )


def _add(losses: StudyLosses, variant: StudyVariant, cell: StoredCell, result: dict) -> None:
    for row in result["cells"]:
        where = (variant.name, row["length"])
        values = (
            None if row.get("unit_nll") is None else np.array(row["unit_nll"], dtype=np.float64)
        )
        if (
            row["method"] == TRAINED
            and row["length"] == losses.trained_length
            and values is not None
        ):
            losses.reference.setdefault(variant.name, {})[cell.seed] = values
        if row["method"] in (variant.method, TRAINED):  # verdicts compare with `trained`
            off = abs(row.get("bfloat16_minus_float32") or 0.0)
            losses.rounding[variant.name] = max(off, losses.rounding.get(variant.name, 0.0))
        if row["method"] != variant.method:
            continue
        if values is None:
            losses.missing[where] = row.get("failure") or "no number"
            if row.get("exists"):
                losses.failed.add(where)
        else:
            losses.nll.setdefault(where, {})[cell.seed] = values
            losses.pooled.setdefault(where, {})[cell.seed] = (row["nll"], row.get("bits_per_byte"))
