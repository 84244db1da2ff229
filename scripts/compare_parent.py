"""Evaluate a branch and the run it goes on from, on the same targets at the same lengths.

    python scripts/compare_parent.py BRANCH              at the parent's length, and 1, 2 and 4 × the branch's
    python scripts/compare_parent.py BRANCH lengths=[256,1024] documents=40 targets=128

Beside the branch stand the parent as trained and, where its weights allow it, the parent under the branch's
own rule without the tuning. Differences are paired, target by target: branch − parent, negative where the
branch is better, with intervals over documents (or clusters) that hold together for all lengths. They speak
of these two checkpoints. Results go to BRANCH/evaluation/parent/. Settings are those of evaluate.py's loss of
text, rules and by-position excepted; cells that were measured before are not measured again.
"""

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from data.files import write_json, write_text
from evaluate import open_stores, subject_of
from evaluation import EvaluationError, EvaluationSettings, Result, Rule, evaluate
from evaluation.rules import TRAINED
from evaluation.statistics import FEW_BELOW, Interval, interval, unit_means
from training.branch import not_at_test_time, open_parent, rule_words
from training.config import load_settings
from training.console import Console, run_main
from training.files import read_json
from training.hardware import prepare_cpu
from training.run import MANIFEST, Loaded, load

SAME_RULE = "same rule"


def main() -> int:
    if len(sys.argv) < 2 or {"--help", "-h"} & set(sys.argv):
        print(__doc__)
        return 0
    prepare_cpu(None)
    run, console = Path(sys.argv[1]), Console()
    branch = load(run, console=console)
    parent, note = parent_of(branch, console)
    settings = load_settings(EvaluationSettings, sys.argv[2:])
    if settings.protocol == "by-position":
        raise EvaluationError(
            "protocol=by-position has no lengths to compare at; evaluate each run by itself"
        )
    settings = settings.model_copy(update={"lengths": lengths_of(settings, parent, branch)})
    rules = [Rule(TRAINED, ())]
    if not note:
        rules.append(Rule(SAME_RULE, tuple(rule_words(parent.settings, branch.settings))))
    stores = open_stores(settings, run, branch.tokenizer)
    results = [
        evaluate(
            settings,
            subject_of(loaded, settings.device, console),
            store=stores.read,
            train=stores.train,
            earlier=stores.earlier,
            tokenizer=branch.tokenizer,
            rules=with_rules,
            cells=run / "evaluation" / "cells",
            overlaps=stores.overlaps,
            console=console,
        )
        for loaded, with_rules in ((branch, rules[:1]), (parent, rules))
    ]
    differences = compared(results[0], results[1], [rule.label for rule in rules])
    report(run, settings, stores.name, results, differences, note, console)
    return 0


def parent_of(branch: Loaded, console: Console) -> tuple[Loaded, str]:
    """The checkpoint a branch began from, and why it cannot be put under the branch's rule ('' if it can)."""
    lineage = read_json(branch.folder / MANIFEST).get("lineage")
    if not lineage:
        raise EvaluationError(f"{branch.folder} is no branch: it was trained from nothing")
    nearest = lineage[0]
    folder, step = Path(nearest["run"]), nearest["step"]
    found = open_parent(folder, step)
    if found.checkpoint.hash != nearest["checkpoint_hash"]:
        raise EvaluationError(
            f"checkpoint {step} of {folder} is not the one {branch.folder} goes on from "
            f"({found.checkpoint.hash[:12]}, then {nearest['checkpoint_hash'][:12]})"
        )
    note = not_at_test_time(found.settings, branch.settings)
    return load(folder, checkpoint=step, console=console), note


def lengths_of(settings: EvaluationSettings, parent: Loaded, branch: Loaded) -> list[int]:
    own = branch.settings.train_length
    asked = settings.lengths or [own, 2 * own, 4 * own]
    return sorted({parent.settings.train_length, own, *asked})


def compared(branch: Result, parent: Result, labels: Sequence[str]) -> dict[tuple[str, int], Interval]:
    """branch − parent by rule of the parent and length, in nats: paired, simultaneous over all of them."""
    if not np.array_equal(branch.document, parent.document) or branch.plan.hash != parent.plan.hash:
        raise EvaluationError(
            "branch and parent were not scored on the same targets; delete evaluation/cells"
        )
    pairs = [
        (label, length)
        for label in labels
        for length in branch.plan.lengths
        if (label, length) in parent.nll and (TRAINED, length) in branch.nll
    ]
    return {
        (label, length): interval(
            unit_means(branch.nll[TRAINED, length] - parent.nll[label, length], branch.unit),
            alpha=1 - branch.settings.confidence,
            family=len(pairs),
            resamples=branch.settings.resamples,
            seed=branch.settings.seed,
        )
        for label, length in pairs
    }


def report(
    run: Path,
    settings: EvaluationSettings,
    corpus: str,
    results: list[Result],
    differences: dict[tuple[str, int], Interval],
    note: str,
    console: Console,
) -> None:
    branch, parent = results
    title = {TRAINED: "parent as trained", SAME_RULE: "parent under the branch's rule"}
    rows, lines = [], []
    for length in branch.plan.lengths:
        row = [f"{length:,}", shown(branch, TRAINED, length)]
        for label in title:
            found = differences.get((label, length))
            row += [shown(parent, label, length), "" if found is None else in_words(found)]
        rows.append(row)
    units = len(np.unique(branch.unit))
    lines.append(
        f"{identified(branch)} and its parent {identified(parent)}: {len(branch.document):,} targets of "
        f"{units} {branch.unit_kind}s of {corpus}, the same at every length."
    )
    lines.append(
        f"Differences are branch − parent in nats, {100 * settings.confidence:g}% intervals over "
        f"{branch.unit_kind}s, simultaneous over all {len(differences)}; of these two checkpoints, not of a "
        "method."
    )
    if units < FEW_BELOW:
        lines.append(f"Few {branch.unit_kind}s ({units}): read the intervals with care.")
    if note:
        lines.append(f"The parent cannot be evaluated under the branch's rule without training: {note}.")
    columns = ["length", "branch"]
    for name in title.values():
        columns += [name, "difference"]
    folder = run / "evaluation" / "parent"
    write_json(
        folder / "results.json",
        {
            "format": 1,
            "command": shlex.join(["python", "scripts/compare_parent.py", *sys.argv[1:]]),
            "branch": about(branch),
            "parent": about(parent),
            "corpus": corpus,
            "targets": branch.plan.hash,
            "settings": settings.model_dump(mode="json"),
            "cells": [
                {"against": label, "length": length, "difference": found.estimate, "units": found.units}
                | {"low": finite(found.low), "high": finite(found.high), "family": found.family}
                | {"branch": mean(branch, TRAINED, length), "parent": mean(parent, label, length)}
                for (label, length), found in differences.items()
            ],
        },
    )
    write_text(folder / "summary.txt", "\n".join(lines) + "\n")
    for line in lines:
        print(line)
    console.table("", columns, rows)
    print(f"numbers: {folder / 'results.json'}")


def identified(result: Result) -> str:
    subject = result.subject
    return f"{subject.name} (step {subject.step}, trained at {subject.trained_length})"


def about(result: Result) -> dict:
    subject = result.subject
    said = {"run": subject.name, "step": subject.step, "checkpoint_hash": subject.checkpoint_hash}
    return said | {"train_length": subject.trained_length}


def mean(result: Result, label: str, length: int) -> float | None:
    found = result.nll.get((label, length))
    return None if found is None else float(found.mean())


def finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def shown(result: Result, label: str, length: int) -> str:
    value = mean(result, label, length)
    return "—" if value is None else f"{value:.4f}"


def in_words(found: Interval) -> str:
    if math.isnan(found.half):
        return f"{found.estimate:+.3f} (too few units)"
    return f"{found.estimate:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


if __name__ == "__main__":
    run_main(main)
