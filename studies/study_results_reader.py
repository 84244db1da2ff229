"""results.json of a study: its cells, its variants and the settings of its report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data.files import read_object
from errors import StudyError
from evaluation.methods import TRAINED
from evaluation.statistics.stored_results import StoredResults

RESULTS = "results.json"
SCHEME = "scheme"  # the axis whose labels are compared
SEED = "seed"  # the axis whose labels repeat the comparison
TOLERANCE = 0.02  # nats
CONFIDENCE = 0.95  # simultaneous level of intervals
# Entries that must be equal, besides the units, for results of an evaluation to be compared.
SHARED = ("protocol", "trained_length", "dtype", "tokenizer_hash", "corpus_hash", "bos")
SHARED += ("targets_hash", "items_hash")
# Training runs with equal values of these entries see the same batches.
SAME_BATCHES = ("seed", "train_length", "batch_size", "tokens", "data_hash")
Group = tuple[tuple[str, str], ...]  # labels on the axes other than the scheme and the seed


class StoredCell(NamedTuple):
    """One training run with its evaluations, finished or not."""

    id: str
    scheme: str
    seed: str
    group: Group
    record: dict


class StudyVariant(NamedTuple):
    """One row of the report: the runs of a scheme under one context-extension method."""

    name: str
    scheme: str
    method: str = TRAINED

    @property
    def columns(self) -> dict[str, str]:
        """The variant's columns in results.csv."""
        return {"scheme": self.scheme, "method": self.method}


@dataclass(frozen=True)
class StoredStudy:
    """Cells and variants in the order of the study. `settings`: the settings of study.py."""

    name: str
    cells: list[StoredCell]
    variants: list[StudyVariant]
    settings: dict[str, Any]

    @property
    def declared(self) -> dict[str, Any]:
        """The settings of the report."""
        return self.settings["report"]

    @property
    def groups(self) -> list[Group]:
        return list(dict.fromkeys(cell.group for cell in self.cells))

    @property
    def baseline(self) -> str:
        """The name of the variant that the others are compared with."""
        return self.declared["baseline"] or self.variants[0].name

    @property
    def evaluations(self) -> list[str]:
        """Names of all evaluations with results in the order of the study, the primary first."""
        measured = {name for cell in self.cells for name in cell.record["evaluations"]}
        order = dict.fromkeys([self.declared["primary"], *self.settings["evaluations"]])
        return [name for name in order if name in measured]

    def results(self, name: str, group: Group) -> tuple[list[StoredResults], dict[str, str]]:
        """The results of an evaluation in a group of cells, for every variant; and, by cell, why
        other results cannot be compared with the first."""
        kept: list[StoredResults] = []
        excluded = {}
        for variant in self.variants:
            for cell in self.cells:
                result = cell.record["evaluations"].get(name)
                if not result or (cell.scheme, cell.group) != (variant.scheme, group):
                    continue
                first = kept[0].record if kept else result
                units = [(each.get("units") or {}).get("names") for each in (first, result)]
                differing = [key for key in SHARED if result.get(key) != first.get(key)]
                differing += ["units"] if units[0] != units[1] else []
                if differing:
                    excluded[cell.id] = f"{', '.join(differing)} differs from the first cell"
                else:
                    kept.append(StoredResults(variant.name, variant.method, cell.seed, result))
        return kept, excluded

    @property
    def unfair(self) -> list[str]:
        """Warnings about cells that cannot be compared fairly, one sentence each."""
        orders: dict[tuple, dict[str, str]] = {}  # batches -> their order -> cells
        tokens: dict[tuple, set[int]] = {}
        for cell in self.cells:
            if training := cell.record["training"]:
                tokens.setdefault((cell.group, cell.seed), set()).add(training["tokens"])
                if order := training.get("data_order"):
                    same = orders.setdefault(tuple(training[key] for key in SAME_BATCHES), {})
                    same[order] = f"{same[order]}, {cell.id}" if order in same else cell.id
        lines = [
            f"Cells of seed {seed} were trained on different batches: {'; '.join(same.values())}."
            for (seed, *_), same in orders.items()
            if len(same) > 1
        ]
        if any(len(each) > 1 for each in tokens.values()):
            lines.append("The schemes were trained on different numbers of tokens.")
        return lines


def title_of(evaluation: str, group: Group) -> str:
    """The title of an evaluation in a group: `held-out, width 64`."""
    return ", ".join([evaluation, *(f"{axis} {label}" for axis, label in group)])


def read_results(folder: Path) -> dict:
    """results.json of a study. Raises StudyError if it does not exist."""
    if not (folder / RESULTS).is_file():
        raise StudyError(f"{folder / RESULTS} does not exist; run the study first")
    return read_object(folder / RESULTS)


def read_study(results: dict) -> StoredStudy:
    """The study in `results`. Raises StudyError if it is not a valid results file."""
    if results.get("format") != 1 or "cells" not in results:
        raise StudyError(
            f"not a results file of a study: format {results.get('format')!r}, expected 1; run "
            "study.py again"
        )
    name = results["name"]
    settings = results["study"]
    axes = [axis for cell in results["cells"] for axis in cell["axes"] if axis != SEED]
    compared = SCHEME if SCHEME in axes else next(iter(axes), SCHEME)
    cells = []
    for record in results["cells"]:
        labels = dict(record["axes"])
        scheme = labels.pop(compared, name)
        seed = labels.pop(SEED, "0")
        cells.append(StoredCell(record["id"], scheme, seed, tuple(labels.items()), record))
    variants = []
    for scheme in dict.fromkeys(cell.scheme for cell in cells):
        own = [
            StudyVariant(label, scheme, entry.get("method", TRAINED))
            for label, entry in settings["variants"].items()
            if entry["scheme"] == scheme
        ]
        # as trained, unless a variant renames it
        if not any(variant.method == TRAINED for variant in own):
            variants.append(StudyVariant(scheme, scheme))
        variants += own
    return StoredStudy(name, cells, variants, settings)
