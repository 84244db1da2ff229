"""Runs a claim: a study whose cells are shared with other claims, and whose settings are frozen
with its first result."""

import shutil
import subprocess
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.data_settings import SymbolSource
from data.files import canonical_hash, read_object, write_json
from errors import StudyError
from evaluation.evaluation_settings import MeasurementSettings
from evaluation.reports.report import write_table
from evaluation.scoring.methods import TRAINED
from run_directory.console import Console
from run_directory.parent_run import read_run_settings
from run_directory.run_names import scheme_names
from run_directory.run_settings import RunSettings
from settings.load import SettingsLayers
from studies.claims.claim_settings import DEFAULTS, ClaimSettings, values_in
from studies.claims.claim_verdicts import (
    ALPHA,
    REPRODUCED,
    ClaimVerdict,
    MeasuredValues,
    PrimaryComparison,
    decide,
    detectable,
    measured_rows,
    read_rows,
    sd_bound,
    verdict_of,
)
from studies.planned_cells import PlannedCell
from studies.stored_study import SEED
from studies.study_run import StudyCall, StudyRun
from studies.study_settings import cells_of
from training.checks import input_limit

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
        """Of everything that decides: what the files and overrides of every cell and evaluation
        say, the seeds, and the comparisons."""
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
        """The settings of the runs of the first seed."""
        first = self.settings.seeds[0]
        cells = [cell for cell in cells_of(self.settings) if cell.axes[SEED] == first]
        return [read_run_settings(cell.arguments, None)[0] for cell in cells]

    @property
    def schemes(self) -> list[str]:
        return sorted({name for run in self._runs for name in scheme_names(run)})

    @property
    def task(self) -> str:
        """The tasks, or text."""
        tasks = {
            run.data.source.task.name if isinstance(run.data.source, SymbolSource) else "text"
            for run in self._runs
        }
        return ", ".join(sorted(tasks))

    @property
    def stored(self) -> Path:
        """The directory of its results: where it has not run, that of the published ones."""
        return self.folder if (self.folder / RECORD).is_file() else PUBLISHED / self.name

    @property
    def record(self) -> dict:
        """claim.json: when and with which hash the claim was frozen; {} before its first run."""
        file = self.stored / RECORD
        return read_object(file) if file.is_file() else {}

    @property
    def status(self) -> str:
        """The verdict, or why there is none."""
        if not self.record:
            return "not run"
        if self.record["hash"] != self.hash:
            return "changed since its first result"
        verdict = self.verdict()
        return "running" if verdict is None else verdict.word

    @property
    def is_decided(self) -> bool:
        """Whether there is a verdict under the present settings."""
        return self.record.get("hash") == self.hash and self.verdict() is not None

    def check_frozen(self) -> None:
        """Raise StudyError if the file was changed after its first result."""
        frozen = self.record.get("hash")
        if frozen is not None and frozen != self.hash:
            raise StudyError(
                f"{self.file}: its grid, evaluations or comparisons were changed after its first "
                "result; restore them, or give the changed claim another name"
            )

    def study_run(self, call: StudyCall, pilot: int = 0) -> StudyRun:
        """The study of the claim, or with `pilot` the same on as many seeds and on targets for
        the choice of settings. Raises StudyError for a value that no evaluation measures."""
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

    def freeze(self) -> None:
        """Record the hash and the commit of the file before the first cell runs. Raises StudyError
        if the file is not committed."""
        self.check_frozen()
        if self.record:
            return
        commit = commit_of(self.file)
        today = datetime.now(UTC).isoformat(timespec="seconds")
        record = {
            "hash": self.hash,
            "commit": commit,
            "frozen": today,
            "seeds": self.settings.seeds,
        }
        write_json(self.folder / RECORD, record)

    def finish(self, results: dict) -> ClaimVerdict | None:
        """Write results.csv and the cost; the verdict, None while cells are missing."""
        cells = results["cells"]
        if not is_complete(results):
            return None
        write_table(self.folder / RESULTS, measured_rows(self.settings, cells))
        seconds = [sum(cell["timing"]["cpu_seconds"].values()) for cell in cells]
        cost = {"cpu_seconds": round(sum(seconds)), "cells": len(cells)}
        write_json(self.folder / RECORD, self.record | cost)
        return self.verdict()

    def publish(self, root: Path) -> "Claim":
        """Copy the record and the results to the directory of claims `root`; the claim there."""
        published = Claim(self.file, self.settings, root)
        if (self.folder / RESULTS).is_file():
            published.folder.mkdir(parents=True, exist_ok=True)
            for name in (RECORD, RESULTS):
                shutil.copy(self.folder / name, published.folder)
        return published

    def verdict(self) -> ClaimVerdict | None:
        """From the stored results; None before they exist."""
        file = self.stored / RESULTS
        return verdict_of(self.settings, read_rows(file)) if file.is_file() else None

    def pilot_values(self, results: dict) -> dict[str, np.ndarray]:
        """The value of each comparison on each pilot seed."""
        measured = MeasuredValues(self.settings, results["cells"])
        seeds = dict.fromkeys(cell["axes"][SEED] for cell in results["cells"])
        values = {}
        for name, comparison in self.settings.comparisons.items():
            numbers = [measured.comparison(comparison.value, seed) for seed in seeds]
            values[name] = np.array([number for number, _ in numbers])
        return values

    def check_power(self, console: Console) -> None:
        """Raise StudyError if the seeds cannot show δ: by the SD of pilot seeds, or for a solved
        task even if every seed is as predicted."""
        seeds = len(self.settings.seeds)
        comparisons = self.settings.comparisons
        for name, comparison in comparisons.items():
            if comparison.solved is None:
                continue
            is_difference = comparison.expect == "positive"
            arms = (np.full(seeds, is_difference), np.zeros(seeds, dtype=bool))
            solved = arms[: len(list(values_in(comparison.value)))]
            best = PrimaryComparison(
                comparison.delta, np.zeros(0), solved=solved, difference=is_difference
            )
            if decide([best], ALPHA / len(comparisons)) != REPRODUCED:
                raise StudyError(
                    f"{self.file}: {seeds} seeds cannot show primary.{name}.delta = "
                    f"{comparison.delta:g}, even if all are as predicted; list more"
                )
        file = self.root / f"{self.name}.pilot" / "results.json"
        if not file.is_file():
            console.info(f"{self.name}: no pilot; whether its seeds can show delta is not known")
            return
        pilot = self.pilot_values(read_object(file))
        sds = {name: sd_bound(values) for name, values in pilot.items()}
        needed = detectable(seeds, len(sds))
        for name, comparison in comparisons.items():
            if comparison.solved is None and comparison.delta < needed * sds[name]:
                raise StudyError(
                    f"{self.file}: primary.{name}.delta = {comparison.delta:g} is below the "
                    f"{needed * sds[name]:.3g} that {seeds} seeds can show "
                    f"(SD at most {sds[name]:.3g}); list more seeds, or raise delta"
                )

    def _check_values(self, plans: list[PlannedCell]) -> None:
        """Raise StudyError for a value that no evaluation measures."""
        claim = self.settings
        by_arm = {tuple(claim.arm(plan.cell.axes).items()): plan for plan in plans}
        for name, comparison in claim.comparisons.items():
            for value in values_in(comparison.value):
                plan = by_arm[tuple(claim.arm(value).items())]
                self._check_value(f"primary.{name}", value, plan)
        for arm in claim.arms:
            plan = by_arm[tuple(arm.items())]
            for condition in claim.conditions(arm):
                self._check_value("learned", condition.value, plan)
                length = condition.value.get("length") or 0
                _, longest = trained_range(plan.settings)
                if length > longest:
                    raise StudyError(
                        f"{self.file}: learned: length {length} is beyond the trained length "
                        f"{longest}"
                    )

    def _check_value(self, place: str, value: dict, plan: PlannedCell) -> None:
        evaluations = {each.name: each.settings for each in plan.evaluations}
        name = value.get("evaluation") or next(iter(evaluations), "")
        settings: MeasurementSettings | None = evaluations.get(name)
        if settings is None:
            raise StudyError(f"{self.file}: {place}: no evaluation of {plan.id} measures {value}")
        measured = {
            "length": lengths_of(plan.settings, settings),
            "method": list(settings.methods),
        }
        asked = DEFAULTS | value
        for key, known in measured.items():
            if asked[key] is not None and asked[key] not in known:
                raise StudyError(
                    f"{self.file}: {place} needs {key} {asked[key]}, which evaluations.{name} does "
                    f"not measure: {', '.join(map(str, known))}"
                )
        limit = input_limit(plan.settings)
        inputs = inputs_of(plan.settings, asked["length"] or 1)
        if asked["method"] == TRAINED and limit is not None and inputs > limit:
            raise StudyError(
                f"{self.file}: {place} needs {inputs} positions at length {asked['length']}, but "
                f"{plan.id} has {limit}; compare shorter lengths, or another scheme"
            )


def trained_range(run: RunSettings) -> tuple[int, int]:
    """The smallest and the largest trained length: of problems, for a task on symbols."""
    source = run.data.source
    length = run.train_length
    return source.bounds if isinstance(source, SymbolSource) else (length, length)


def lengths_of(run: RunSettings, settings: Any) -> list[int]:
    """The lengths of an evaluation; the largest of each range of a task on symbols."""
    if isinstance(run.data.source, SymbolSource):
        return [longest for _, longest in settings.ranges(trained_range(run))]
    return settings.grid(run.train_length)


def inputs_of(run: RunSettings, length: int) -> int:
    """The tokens of an input of a length: that of its problem, for a task on symbols."""
    source = run.data.source
    if isinstance(source, SymbolSource):
        return source.model_copy(update={"lengths": length}).inputs(run.data.bos)
    return length


def is_complete(results: dict) -> bool:
    return all(cell["status"] == "done" for cell in results["cells"])


def _tree(arguments) -> dict:
    """What files and overrides say, without the defaults of this version."""
    return SettingsLayers(list(arguments)).tree


def commit_of(file: Path) -> str:
    """The commit that changed a file last, "" outside a repository. Raises StudyError if the file
    has changed since."""

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(file.parent), *words, "--", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("log", "-1", "--format=%H")
    if commit is not None and (not commit or git("status", "--porcelain")):
        raise StudyError(
            f"{file} is not committed: commit it before its first result, so that everybody can "
            "see that it did not follow from it; --pilot N runs it on N other seeds"
        )
    return commit or ""
