"""Runs a claim: a study that shares cells with other claims and whose settings are frozen before
its first result."""

import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.data_settings import SymbolSource
from data.files import canonical_hash, read_object, write_json
from errors import StudyError
from evaluation.reports.report import write_table
from run_directory.parent_run import read_run_settings
from run_directory.run_names import scheme_names
from run_directory.run_settings import RunSettings
from settings.load import SettingsLayers
from studies.claims.claim_settings import ClaimSettings
from studies.claims.claim_verdicts import (
    LEARNED,
    ClaimVerdict,
    MeasuredValues,
    measured_rows,
    read_verdict,
)
from studies.expressions import DEFAULTS, values_in
from studies.planned_cells import PlannedCell
from studies.study_results_reader import SEED
from studies.study_run import StudyCall, StudyRun
from studies.study_settings import cells_of

ROOT = Path("runs/claims")
PUBLISHED = Path("docs/results/claims")
SHARED = "cells"  # the folder of run directories, below ROOT
RECORD = "claim.json"
RESULTS = "results.csv"


class Claim:
    """A claim file and its directory, which has claim.json and results.csv.

    Args:
        root: the directory of all claims.
    """

    def __init__(self, file: Path, settings: ClaimSettings, root: Path = ROOT):
        self.file = file
        self.settings = settings
        self.root = root
        self.name = file.stem
        self.folder = root / self.name

    @cached_property
    def hash(self) -> str:
        """Hash of everything that determines the verdict: the files and overrides of every cell and
        evaluation, the seeds, and the comparisons."""
        claim = self.settings
        evaluations = {
            name: [_tree(entry.overrides), _tree(entry.data or []), entry.skip]
            for name, entry in claim.evaluations.items()
        }
        decides = claim.model_dump(mode="json", include={"primary", "learned"})
        cells = {cell.id: _tree(cell.arguments) for cell in cells_of(claim)}
        return canonical_hash([cells, evaluations, decides])[:16]

    @cached_property
    def _runs(self) -> list[RunSettings]:
        """The run settings of all cells of the first seed."""
        first = self.settings.seeds[0]
        cells = [cell for cell in cells_of(self.settings) if cell.axes[SEED] == first]
        return [read_run_settings(cell.arguments, None)[0] for cell in cells]

    @property
    def schemes(self) -> list[str]:
        return sorted({name for run in self._runs for name in scheme_names(run)})

    @property
    def task(self) -> str:
        """The names of the tasks; `text` for a run on text."""
        tasks = {
            run.data.source.task.name if isinstance(run.data.source, SymbolSource) else "text"
            for run in self._runs
        }
        return ", ".join(sorted(tasks))

    @property
    def stored(self) -> Path:
        """The directory of the claim's results; if it has not run here, the directory of the
        published results."""
        return self.folder if (self.folder / RECORD).is_file() else PUBLISHED / self.name

    @property
    def record(self) -> dict:
        """The content of claim.json: when and with which hash the claim was frozen; {} before its
        first run."""
        file = self.stored / RECORD
        return read_object(file) if file.is_file() else {}

    @property
    def status(self) -> str:
        """The verdict, or why it is missing."""
        if not self.record:
            return "not run"
        if self.record["hash"] != self.hash:
            return "changed since its first result"
        verdict = self.verdict()
        return "running" if verdict is None else verdict.word

    @property
    def is_decided(self) -> bool:
        """Whether the claim has a verdict under its current settings."""
        return self.record.get("hash") == self.hash and self.verdict() is not None

    def study_run(self, call: StudyCall, pilot: int = 0) -> StudyRun:
        """The study of the claim. With `pilot`, the same study on `pilot` other seeds and on other
        targets, for the choice of settings. Raises StudyError for a value that no evaluation
        measures."""
        study = self.settings
        name = self.name
        folder = self.folder
        if pilot:
            seeds = {str(seed): [f"seed={seed}"] for seed in range(pilot)}
            evaluations = {
                name: entry.model_copy(update={"overrides": [*entry.overrides, "seed=1"]})
                for name, entry in study.evaluations.items()
            }
            update = {"grid": study.grid | {SEED: seeds}, "evaluations": evaluations}
            study = study.model_copy(update=update)
            folder = self.root / f"{name}.pilot"
        shared = self.root / SHARED
        run = StudyRun(study, name, folder, call, shared)
        self._check_values(run.cells)
        return run

    def freeze(self, is_dry: bool) -> None:
        """Record the hash and the commit of the file before the first cell runs. Raises StudyError
        if the file is not committed, or was changed after its first result.

        Args:
            is_dry: only check whether the claim was changed.
        """
        frozen = self.record.get("hash")
        if frozen is not None and frozen != self.hash:
            raise StudyError(
                f"{self.file}: its grid, evaluations or comparisons were changed after its first "
                "result; restore them, or give the changed claim another name"
            )
        if self.record or is_dry:
            return
        record = {
            "hash": self.hash,
            "commit": commit_of(self.file),
            "frozen": datetime.now(UTC).isoformat(timespec="seconds"),
            "seeds": self.settings.seeds,
        }
        write_json(self.folder / RECORD, record)

    def finish(self, results: dict) -> ClaimVerdict | None:
        """Write results.csv and the cost, and return the verdict; None while cells are missing."""
        cells = results["cells"]
        if not is_complete(results):
            return None
        write_table(self.folder / RESULTS, measured_rows(self.settings, cells))
        if "cpu_seconds" not in self.record:  # written only by the call that finishes the claim
            seconds = [sum(cell["timing"]["cpu_seconds"].values()) for cell in cells]
            cost = {"cpu_seconds": round(sum(seconds)), "cells": len(cells)}
            write_json(self.folder / RECORD, self.record | cost)
        return self.verdict()

    def publish(self, root: Path) -> "Claim":
        """Copy the record and the results to `root`, a directory of claims. Returns the copied
        claim."""
        published = Claim(self.file, self.settings, root)
        if (self.folder / RESULTS).is_file():
            published.folder.mkdir(parents=True, exist_ok=True)
            for name in (RECORD, RESULTS):
                shutil.copy(self.folder / name, published.folder)
        return published

    def verdict(self) -> ClaimVerdict | None:
        """The verdict of the stored results; None if there are none."""
        file = self.stored / RESULTS
        return read_verdict(self.settings, file) if file.is_file() else None

    def pilot_values(self, results: dict) -> dict[str, np.ndarray]:
        """The value of each comparison on each pilot seed."""
        measured = MeasuredValues(self.settings, results["cells"])
        seeds = dict.fromkeys(cell["axes"][SEED] for cell in results["cells"])
        return {
            name: np.array([measured.comparison(comparison.value, seed)[0] for seed in seeds])
            for name, comparison in self.settings.comparisons.items()
        }

    def _check_values(self, cells: Sequence[PlannedCell]) -> None:
        """Raise StudyError for a value that no evaluation measures."""
        claim = self.settings
        by_arm = {tuple(claim.arm(cell.axes).items()): cell for cell in cells}
        values = [
            (f"primary.{name}", value)
            for name, comparison in claim.comparisons.items()
            for value in values_in(comparison.value)
        ]
        values += [
            (LEARNED, condition.value | arm)
            for arm in claim.arms
            for condition in claim.conditions(arm)
        ]
        for place, value in values:
            cell = by_arm[tuple(claim.arm(value).items())]
            evaluations = {each.name: each.settings for each in cell.evaluations}
            name = value.get("evaluation") or next(iter(evaluations), "")
            if name not in evaluations:
                raise StudyError(
                    f"{self.file}: {place}: no evaluation of {cell.id} measures {value}"
                )
            settings = evaluations[name]
            measured = {
                "length": lengths_of(cell.settings, settings),
                "method": list(settings.methods),
            }
            for key, known in measured.items():
                asked = (DEFAULTS | value)[key]
                if asked is not None and asked not in known:
                    raise StudyError(
                        f"{self.file}: {place} needs {key} {asked}, which evaluations.{name} does "
                        f"not measure: {', '.join(map(str, known))}"
                    )
            _, longest = trained_range(cell.settings)
            length = value.get("length") or 0
            if place == LEARNED and length > longest:
                raise StudyError(
                    f"{self.file}: learned: length {length} is beyond the trained length {longest}"
                )


def trained_range(run: RunSettings) -> tuple[int, int]:
    """The smallest and the largest trained length; for a task on symbols, of its problems."""
    source = run.data.source
    length = run.train_length
    return source.bounds if isinstance(source, SymbolSource) else (length, length)


def lengths_of(run: RunSettings, settings: Any) -> list[int]:
    """The lengths of an evaluation; for a task on symbols, the largest length of each range."""
    if isinstance(run.data.source, SymbolSource):
        return [longest for _, longest in settings.ranges(trained_range(run))]
    return settings.grid(run.train_length)


def is_complete(results: dict) -> bool:
    return all(cell["status"] == "done" for cell in results["cells"])


def _tree(arguments) -> dict:
    """The settings in files and overrides, without the defaults of this version."""
    return SettingsLayers(list(arguments)).tree


def commit_of(file: Path) -> str:
    """The last commit that changed a file; "" outside a repository. Raises StudyError if the file
    is not committed or has changed since."""

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(file.parent), *words, "--", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("log", "-1", "--format=%H")
    if commit is not None and (not commit or git("status", "--porcelain")):
        raise StudyError(
            f"{file} is not committed: commit it before its first result, as proof that the claim "
            "came first; --pilot N runs it on N other seeds"
        )
    return commit or ""
