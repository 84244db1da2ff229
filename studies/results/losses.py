"""The losses of one evaluation as arrays: the NLL of every variant, length, seed and unit."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from errors import EvaluationError
from evaluation.comparable import comparable
from evaluation.scoring.methods import TRAINED
from studies.results.stored import Group, StoredCell, StoredStudy, StudyVariant

PROTOCOLS = ("fixed-targets", "sliding", "non-overlapping")  # with the loss of units by length
SHARED = ("trained_length", "dtype")  # must be equal besides the targets


@dataclass
class StudyLosses:
    """The losses of one evaluation in one group of cells.

    Attributes:
        facts: protocol, corpus, hashes and other facts from the evaluation of the first cell.
        targets: (D,) target tokens of each unit.
        seen: (D,) whether a unit also occurs in the training data.
        unigram: NLL of a unigram model on the same targets; None if not measured.
        nll: by (variant, length) and seed, (D,) mean NLL of each unit.
        pooled: by (variant, length) and seed: (mean NLL over all targets, bits per byte or None).
        reference: by variant and seed, (D,) NLL as trained at the trained length.
        repeated: by (variant, length, (shortest distance, longest + 1)) and seed: mean NLL and
            control NLL of each unit with targets that repeat text at these distances, (2, D).
        missing: by (variant, length): why there is no number. If one seed has none, the other
            seeds are dropped too: a mean over the successful seeds only would be biased.
        failed: entries of `missing` that could have been measured; they count in the family.
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
    pooled: dict[tuple[str, int], dict[str, tuple]] = field(default_factory=dict)
    reference: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    repeated: dict[tuple, dict[str, np.ndarray]] = field(default_factory=dict)
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

    def seeds(self, name: str, length: int) -> list[str]:
        """The seeds measured at this length and as trained at the trained length."""
        reference = self.reference.get(name, {})
        return [seed for seed in self.nll.get((name, length), {}) if seed in reference]

    def shift(self, name: str, length: int) -> np.ndarray:
        """(S, D) NLL at this length minus NLL as trained at the trained length."""
        seeds = self.seeds(name, length)
        return stacked(self.nll[name, length], seeds) - stacked(self.reference[name], seeds)

    def add(
        self,
        variant: StudyVariant,
        cell: StoredCell,
        result: dict,
    ) -> None:
        """Add the results of a cell for a variant of its scheme."""
        for row in result["cells"]:
            if row["method"] not in (variant.method, TRAINED):
                continue
            off = abs(row.get("bfloat16_minus_float32") or 0.0)
            self.rounding[variant.name] = max(off, self.rounding.get(variant.name, 0.0))
            place = (variant.name, row["length"])
            measured = row.get("unit_nll") is not None
            nll = np.array(row["unit_nll"], dtype=np.float64) if measured else None
            if measured and row["method"] == TRAINED and row["length"] == self.trained_length:
                self.reference.setdefault(variant.name, {})[cell.seed] = nll
            if row["method"] != variant.method:
                continue
            if measured:
                self.nll.setdefault(place, {})[cell.seed] = nll
                pooled = (row["nll"], row.get("bits_per_byte"))
                self.pooled.setdefault(place, {})[cell.seed] = pooled
            else:
                self.missing[place] = row.get("failure") or "no number"
                if row.get("exists"):
                    self.failed.add(place)

    def add_repeated(self, variant: StudyVariant, cell: StoredCell, result: dict) -> None:
        """Add the losses of repeated text, of cells with the targets of the first."""
        repeated = result.get("repeated") or {}
        if repeated.get("hash") != (self.facts.get("repeated") or {}).get("hash"):
            return
        for row in repeated.get("cells", []):
            if row["method"] == variant.method:
                where = row["distance_low"], row["distance_high"]
                losses = np.array([row["unit_nll"], row["unit_control_nll"]], dtype=np.float64)
                place = (variant.name, row["length"], where)
                self.repeated.setdefault(place, {})[cell.seed] = losses

    def drop_incomplete(self) -> None:
        """Drop the other seeds of a length at which one seed failed."""
        for place in self.missing:
            if measured := self.nll.pop(place, None):
                self.failed.add(place)
                self.missing[place] += f" (measured for seed {', '.join(measured)})"


def stacked(by_seed: dict[str, np.ndarray], seeds: Iterable[str] | None = None) -> np.ndarray:
    """(S, D) in the given order of seeds."""
    return np.stack([by_seed[seed] for seed in (by_seed if seeds is None else seeds)])


def read_losses(
    study: StoredStudy,
    name: str,
    group: Group,
) -> StudyLosses | None:
    """The losses of one evaluation in one group; None for another protocol or no results."""
    results = [
        (variant, cell, result)
        for variant, cell, result in study.results(name, group)
        if result.get("protocol") in PROTOCOLS
    ]
    if not results:
        return None
    _, first_cell, first = results[0]
    units = first["units"]
    unigram = first.get("unigram_unit_nll")
    losses = StudyLosses(
        name=name,
        group=group,
        variants=study.variants,
        facts={k: v for k, v in first.items() if k not in ("cells", "units", "summary")},
        kind=units["kind"],
        units=list(units["names"]),
        targets=np.array(units["targets"], dtype=np.int64),
        seen=np.array(units.get("seen") or [False] * len(units["names"]), dtype=bool),
        unigram=None if unigram is None else float(np.mean(unigram, dtype=np.float64)),
    )
    for variant, cell, result in results:
        if reason := _difference(first_cell.id, first, cell.id, result):
            losses.excluded[cell.id] = reason
        else:
            losses.add(variant, cell, result)
            losses.add_repeated(variant, cell, result)
    losses.drop_incomplete()
    return losses


def _difference(first_id: str, first: dict, other_id: str, other: dict) -> str:
    """Why two results cannot be compared; '' if they can."""
    try:
        comparable({first_id: first, other_id: other})
    except EvaluationError as error:
        return str(error)
    differing = [key for key in SHARED if first.get(key) != other.get(key)]
    if first["units"]["names"] != other["units"]["names"]:
        differing.append("units")
    return f"{', '.join(differing)} differs from {first_id}" if differing else ""
