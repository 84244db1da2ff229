"""Compare an extension run with its parent run on the same targets at the same lengths.

    python scripts/compare_parent.py RUN              at the parent's length and 1, 2 and 4 × the run's length
    python scripts/compare_parent.py RUN lengths=[256,1024] documents=40 targets=128

The parent is evaluated at the checkpoint that RUN started from: as trained and, if its weights allow it,
under the run's context-extension method without fine-tuning. Differences are paired by target, run − parent,
negative if the run is better, with intervals over documents (or clusters) that are simultaneous over all
lengths. Results are written to RUN/evaluation/parent/. Settings are those of evaluate.py's loss protocols,
except `methods` and protocol=by-position; cached results are reused. `evaluate.py A B` compares other runs.
"""

import json
import shlex
import sys
from pathlib import Path

from errors import EvaluationError
from evaluation.reports.comparison_report import RunComparison, comparison_report
from evaluation.scoring.evaluate import EvaluationSession
from evaluation.scoring.methods import TRAINED, Method
from evaluation.settings import EvaluationSettings
from settings.load import load_settings
from settings.script import run_main
from studies.evaluate_runs import provenance, show
from studies.subjects import open_stores, subject_of
from training.logging.console import Console
from training.run.compatibility import method_of, not_at_test_time
from training.run.directory import LoadedRun, load, read_manifest
from training.run.hardware import prepare_cpu
from training.run.parent import open_parent

SAME_METHOD = "same method"


def main() -> int:
    if len(sys.argv) < 2 or {"--help", "-h"} & set(sys.argv):
        print(__doc__)
        return 0
    prepare_cpu(None)
    run = Path(sys.argv[1])
    console = Console()
    extension = load(run, console=console)
    parent, methods, note = parent_of(extension, console)
    settings = load_settings(EvaluationSettings, sys.argv[2:])
    if settings.protocol == "by-position":
        raise EvaluationError(
            "protocol=by-position has no lengths to compare; evaluate each run separately"
        )
    own = extension.settings.train_length
    lengths = {parent.settings.train_length, own, *(settings.lengths or [own, 2 * own, 4 * own])}
    settings = settings.model_copy(update={"lengths": sorted(lengths)})
    stores = open_stores(settings, run, extension.tokenizer)
    results = [
        EvaluationSession(
            settings,
            subject_of(loaded, settings.device, console),
            store=stores.read,
            train=stores.train,
            earlier=stores.earlier,
            tokenizer=extension.tokenizer,
            methods=under,
            cells=run / "evaluation" / "cells",
            overlaps=stores.overlaps,
            console=console,
        ).run()
        for loaded, under in ((extension, methods[:1]), (parent, methods))
    ]
    facts = {"corpus": stores.name, "settings": settings.model_dump(mode="json"), "note": note}
    facts |= provenance(shlex.join(["python", "scripts/compare_parent.py", *sys.argv[1:]]))
    comparison = RunComparison(["run", "parent"], results, minuend="first")
    report = comparison_report(comparison, "parent", facts)
    show(report, report.write(run / "evaluation" / report.name))
    return 0


def parent_of(extension: LoadedRun, console: Console) -> tuple[LoadedRun, list[Method], str]:
    """The checkpoint an extension run started from, the methods to evaluate it under, and why the run's own
    method is not among them ('' if it is)."""
    lineage = read_manifest(extension.folder).get("lineage")
    if not lineage:
        raise EvaluationError(f"{extension.folder} is not an extension run: it has no parent")
    folder = Path(lineage[0]["run"])
    step = lineage[0]["step"]
    expected = lineage[0]["checkpoint_hash"]
    found = open_parent(folder, step)
    if found.checkpoint.hash != expected:
        raise EvaluationError(
            f"checkpoint {step} of {folder} is not the parent of {extension.folder}: its hash is "
            f"{found.checkpoint.hash[:12]}, expected {expected[:12]}"
        )
    methods = [Method(TRAINED, ())]
    note = not_at_test_time(found.settings, extension.settings)
    if note:
        console.warn(
            f"the parent cannot be evaluated under the run's method without training: {note}"
        )
    else:
        position = method_of(found.settings, extension.settings).position.model_dump(mode="json")
        methods.append(Method(SAME_METHOD, (f"model.position={json.dumps(position)}",)))
    return load(folder, checkpoint=step, console=console), methods, note


if __name__ == "__main__":
    run_main(main)
