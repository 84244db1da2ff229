"""Compare an extension run with its parent run on the same targets at the same lengths.

    python scripts/compare_parent.py RUN
    python scripts/compare_parent.py RUN lengths=[256,1024] documents=40 targets=128

The lengths are by default the parent's trained length and 1, 2 and 4 times the run's. The parent is
evaluated at the checkpoint that RUN started from: as trained and, if its weights allow it, under
the run's context-extension method without fine-tuning. Differences are paired by target, parent −
run, positive if the run is better, with intervals over documents (or clusters) that are
simultaneous over all lengths. By default 64 targets of each of 20 documents are scored. Results are
written to RUN/evaluation/parent/. Settings are those of evaluate.py's loss protocols, except
`methods` and protocol=by-position; cached results are reused. `evaluate.py A B` compares other
runs.
"""

import shlex
import sys
from pathlib import Path

from errors import EvaluationError
from evaluation.evaluate_runs import provenance, show
from evaluation.evaluated_model import EvaluatedRun
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.ranks import EvaluationRanks
from evaluation.reports.comparison_report import comparison_report
from evaluation.scoring.chosen_targets import choose_targets
from evaluation.scoring.evaluate import EvaluationSession
from evaluation.scoring.methods import TRAINED, Method
from evaluation.stores import open_stores
from model.devices import prepare_cpu
from run_directory.console import Console
from run_directory.parent_run import method_of, not_at_test_time, open_parent
from settings.load import load_settings
from settings.script import run_main

SAME_METHOD = "same method"
# Without settings the comparison takes about a minute for 3M parameters on two cores.
QUICK = ("documents=20", "spans_per_document=1", "targets=64")


def main() -> int:
    if len(sys.argv) < 2 or {"--help", "-h"} & set(sys.argv):
        print(__doc__)
        return 0
    prepare_cpu(None)
    run = Path(sys.argv[1])
    console = Console()
    settings = load_settings(EvaluationSettings, [*QUICK, *sys.argv[2:]])
    device = EvaluationRanks().device(settings.device)
    extension = EvaluatedRun.open(run, "run", device, console, settings.dtype)
    folder, step, methods, note = parent_of(extension, console)
    parent = EvaluatedRun.open(
        folder,
        "parent",
        device,
        console,
        settings.dtype,
        checkpoint=step,
    )
    if settings.protocol == "by-position":
        raise EvaluationError(
            "protocol=by-position has no lengths to compare; evaluate each run separately"
        )
    own = extension.model.trained_length
    lengths = settings.lengths or [own, 2 * own, 4 * own]
    lengths = sorted({parent.model.trained_length, own, *lengths})
    settings = settings.model_copy(update={"lengths": lengths})
    stores = open_stores(settings, [extension])
    results = [
        EvaluationSession(
            settings,
            evaluated.model,
            choose_targets(
                settings, stores, extension.tokenizer, evaluated.model.trained_length, console
            ),
            under,
            extension.cells,
            console,
        ).run()
        for evaluated, under in ((extension, methods[:1]), (parent, methods))
    ]
    facts = {"corpus": stores.name, "settings": settings.model_dump(mode="json"), "note": note}
    facts |= provenance(shlex.join(["python", "scripts/compare_parent.py", *sys.argv[1:]]))
    report = comparison_report(["run", "parent"], results, "parent", facts)
    show(report, report.write(run / "evaluation" / report.name))
    return 0


def parent_of(extension: EvaluatedRun, console: Console) -> tuple[Path, int, list[Method], str]:
    """The run and step an extension run started from, the methods to evaluate it under, and why the
    run's own method is not among them ('' if it is)."""
    lineage = extension.run.manifest.get("lineage")
    if not lineage:
        raise EvaluationError(f"{extension.folder} is not an extension run: it has no parent")
    folder = Path(lineage[0]["run"])
    step = lineage[0]["step"]
    expected = lineage[0]["checkpoint_hash"]
    parent = open_parent(folder, step)
    if parent.checkpoint.hash != expected:
        raise EvaluationError(
            f"checkpoint {step} of {folder} is not the parent of {extension.folder}: its hash is "
            f"{parent.checkpoint.hash[:12]}, expected {expected[:12]}"
        )
    methods = [Method(TRAINED, ())]
    trained = extension.model.settings
    note = not_at_test_time(parent.settings, trained)
    if note:
        console.warn(
            f"the parent cannot be evaluated under the run's method without training: {note}"
        )
    else:
        model = method_of(parent.settings, trained)
        schemes = [
            f"{model.position_key(name)}={kind.position.model_dump_json()}"
            for name, kind in model.resolved_kinds.items()
        ]
        methods.append(Method(SAME_METHOD, tuple(schemes)))
    return folder, step, methods, note


if __name__ == "__main__":
    run_main(main)
