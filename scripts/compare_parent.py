"""Compare an extension run with its parent run on the same targets at the same lengths.

    python scripts/compare_parent.py RUN              at the parent's length and 1, 2 and 4 × the run's length
    python scripts/compare_parent.py RUN lengths=[256,1024] documents=40 targets=128

The parent is evaluated as trained and, if its weights allow it, under the run's context-extension method
without fine-tuning. Differences are paired by target, run − parent, negative if the run is better, with
intervals over documents (or clusters) that are simultaneous over all lengths. They apply to these two
checkpoints only. Results are written to RUN/evaluation/parent/. Settings are those of evaluate.py's loss
protocols, except `methods` and protocol=by-position; cached results are reused.
"""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from data.files import write_json, write_text
from evaluation import EvaluationError, EvaluationResult, EvaluationSettings, Method, evaluate
from evaluation.comparison import differences, entries_of
from evaluation.scoring.methods import TRAINED
from evaluation.statistics.intervals import FEW_BELOW, Interval
from studies.subjects import open_stores, subject_of
from training.config.load import load_settings
from training.files import read_json
from training.logging.console import Console, run_main
from training.run.compatibility import method_of, not_at_test_time
from training.run.directory import MANIFEST, LoadedRun, load
from training.run.hardware import prepare_cpu
from training.run.parent import open_parent

SAME_METHOD = "same method"


def main() -> int:
    if len(sys.argv) < 2 or {"--help", "-h"} & set(sys.argv):
        print(__doc__)
        return 0
    prepare_cpu(None)
    run, console = Path(sys.argv[1]), Console()
    extension = load(run, console=console)
    parent, note = parent_of(extension, console)
    settings = load_settings(EvaluationSettings, sys.argv[2:])
    if settings.protocol == "by-position":
        raise EvaluationError("protocol=by-position has no lengths to compare; evaluate each run separately")
    settings = settings.model_copy(update={"lengths": lengths_of(settings, parent, extension)})
    methods = [Method(TRAINED, ())]
    if not note:
        position = method_of(parent.settings, extension.settings).position.model_dump(mode="json")
        methods.append(Method(SAME_METHOD, (f"model.position={json.dumps(position)}",)))
    stores = open_stores(settings, run, extension.tokenizer)
    results = [
        evaluate(
            settings,
            subject_of(loaded, settings.device, console),
            store=stores.read,
            train=stores.train,
            earlier=stores.earlier,
            tokenizer=extension.tokenizer,
            methods=with_methods,
            cells=run / "evaluation" / "cells",
            overlaps=stores.overlaps,
            console=console,
        )
        for loaded, with_methods in ((extension, methods[:1]), (parent, methods))
    ]
    differences = compared(results[0], results[1], [method.label for method in methods])
    report(run, settings, stores.name, results, differences, note, console)
    return 0


def parent_of(extension: LoadedRun, console: Console) -> tuple[LoadedRun, str]:
    """The checkpoint an extension run started from, and why it cannot be evaluated under the run's method (''
    if it can)."""
    lineage = read_json(extension.folder / MANIFEST).get("lineage")
    if not lineage:
        raise EvaluationError(f"{extension.folder} is not an extension run: it has no parent")
    nearest = lineage[0]
    folder, step = Path(nearest["run"]), nearest["step"]
    found = open_parent(folder, step)
    if found.checkpoint.hash != nearest["checkpoint_hash"]:
        raise EvaluationError(
            f"checkpoint {step} of {folder} is not the parent of {extension.folder}: its hash is "
            f"{found.checkpoint.hash[:12]}, expected {nearest['checkpoint_hash'][:12]}"
        )
    note = not_at_test_time(found.settings, extension.settings)
    return load(folder, checkpoint=step, console=console), note


def lengths_of(settings: EvaluationSettings, parent: LoadedRun, extension: LoadedRun) -> list[int]:
    own = extension.settings.train_length
    lengths = settings.lengths or [own, 2 * own, 4 * own]
    return sorted({parent.settings.train_length, own, *lengths})


def compared(
    extension: EvaluationResult, parent: EvaluationResult, labels: Sequence[str]
) -> dict[tuple[str, int], Interval]:
    """run − parent in nats, by method of the parent and length: paired, simultaneous over all."""
    own, *others = entries_of(["run", "parent"], [extension, parent])
    others = [entry for entry in others if entry.method in labels]
    found = differences([own] * len(others), others, extension.plan.lengths)
    return {(others[i].method, length): one for (i, length), one in found.items()}


def report(
    run: Path,
    settings: EvaluationSettings,
    corpus: str,
    results: list[EvaluationResult],
    differences: dict[tuple[str, int], Interval],
    note: str,
    console: Console,
) -> None:
    extension, parent = results
    title = {TRAINED: "parent as trained", SAME_METHOD: "parent under the run's method"}
    rows, lines = [], []
    for length in extension.plan.lengths:
        row = [f"{length:,}", shown(extension, TRAINED, length)]
        for label in title:
            found = differences.get((label, length))
            row += [shown(parent, label, length), "" if found is None else in_words(found)]
        rows.append(row)
    units = len(np.unique(extension.unit))
    lines.append(
        f"{identified(extension)} and its parent {identified(parent)}: "
        f"{len(extension.document):,} targets of "
        f"{units} {extension.unit_kind}s of {corpus}, the same at every length."
    )
    lines.append(
        f"Differences are run − parent in nats, {100 * settings.confidence:g}% intervals over "
        f"{extension.unit_kind}s, simultaneous over all {len(differences)}; they apply to these two "
        "checkpoints, not to the method in general."
    )
    if units < FEW_BELOW:
        lines.append(f"Few {extension.unit_kind}s ({units}): interpret the intervals with care.")
    if note:
        lines.append(f"The parent cannot be evaluated under the run's method without training: {note}.")
    columns = ["length", "run"]
    for name in title.values():
        columns += [name, "difference"]
    folder = run / "evaluation" / "parent"
    write_json(
        folder / "results.json",
        {
            "format": 1,
            "command": shlex.join(["python", "scripts/compare_parent.py", *sys.argv[1:]]),
            "run": about(extension),
            "parent": about(parent),
            "corpus": corpus,
            "targets": extension.plan.hash,
            "settings": settings.model_dump(mode="json"),
            "cells": [
                {"against": label, "length": length, "difference": found.estimate, "units": found.units}
                | {"low": finite(found.low), "high": finite(found.high), "family": found.family}
                | {"run": mean(extension, TRAINED, length), "parent": mean(parent, label, length)}
                for (label, length), found in differences.items()
            ],
        },
    )
    write_text(folder / "summary.txt", "\n".join(lines) + "\n")
    for line in lines:
        print(line)
    console.table("", columns, rows)
    print(f"numbers: {folder / 'results.json'}")


def identified(result: EvaluationResult) -> str:
    subject = result.subject
    return f"{subject.name} (step {subject.step}, trained at {subject.trained_length})"


def about(result: EvaluationResult) -> dict:
    subject = result.subject
    found = {"run": subject.name, "step": subject.step, "checkpoint_hash": subject.checkpoint_hash}
    return found | {"train_length": subject.trained_length}


def mean(result: EvaluationResult, label: str, length: int) -> float | None:
    found = result.nll.get((label, length))
    return None if found is None else float(found.mean())


def finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def shown(result: EvaluationResult, label: str, length: int) -> str:
    value = mean(result, label, length)
    return "—" if value is None else f"{value:.4f}"


def in_words(found: Interval) -> str:
    if math.isnan(found.half):
        return f"{found.estimate:+.3f} (too few units)"
    return f"{found.estimate:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


if __name__ == "__main__":
    run_main(main)
