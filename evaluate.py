"""Evaluate a trained run at its trained length and beyond.

    python evaluate.py RUN                                     as trained, and truncated to the trained length
    python evaluate.py RUN configs/evaluation/extension.yaml   with a settings file
    python evaluate.py RUN lengths=[256,512] methods=[trained,truncate,yarn] targets=128
    python evaluate.py RUN --matrix                            all applicable methods, in one table
    python evaluate.py RUN --matrix --verbose                  ... with the reasons why others do not apply
    python evaluate.py A B C lengths=[256,512]                 several runs on the same targets, relative to A
    python evaluate.py RUN --dry-run                           list the cells, estimate memory and time
    torchrun --nproc_per_node 2 evaluate.py RUN                on two processes (CPU) or two GPUs
    torchrun --nproc_per_node 2 evaluate.py RUN context=2 lengths=[262144]   two processes share each window
    python evaluate.py RUN configs/tasks/passkey.yaml          a task: accuracy by length and depth
    python evaluate.py hf:HuggingFaceTB/SmolLM2-135M           a model of Hugging Face: hub name or folder
    python evaluate.py --help                                  every setting

`protocol` selects what is measured: the loss of text (fixed-targets, sliding, non-overlapping, by-position),
tasks, attention or generation. Each kind has its own settings.

--matrix tries every built-in context-extension method and keeps those that apply to the checkpoint: legal for
its scheme and weights, and different from the checkpoint as trained. In a checkpoint with a pattern of layer
kinds a method applies to each kind that accepts all of it; the other kinds stay as trained, and a narrower
window is kept. Custom overrides apply to patterns in the same way, unless they name a kind:
model.position.kinds.KIND.window=64. A cell that cannot exist, such as a length past the end of a learned
table, is printed as a dash with its reason. Methods use the declared length of a window, the same for all its
tokens, so prefilling a cache in chunks gives the numbers of a single pass.

Several runs, which must share a tokenizer, are compared with the first by paired differences on the same
targets, as trained or under each of `methods`. The results are written to the first run's folder.

--dry-run checks that the checkpoint and the text exist, lists the cells and estimates memory and time. It
skips the search for overlaps with the training text.

Results are written to RUN/evaluation/<folder>/: results.csv, results.json, summary.txt and figures. Cells
measured before are reused, so an interrupted evaluation continues where it stopped. hf:FOLDER, hf:NAME and
gguf:FILE are first converted to a run in runs/imported/, where their results are written.

Several processes give the same numbers as one; rank 0 writes and prints. Windows are divided among them.
With context=N, N processes share each window, for lengths that do not fit into the memory of one: each reads
1/N of the tokens and holds the keys of one layer at a time.
"""

from settings.command_line import answer_quickly, parse

if __name__ == "__main__":
    answer_quickly(__doc__)  # prints help and misspelled settings before torch is imported

import shlex
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from data.files import write_text
from errors import printable
from evaluation import EvaluationError
from evaluation.kinds import Evaluation, kind_of_protocol
from evaluation.ranks import joined
from evaluation.reports.evaluation_report import EvaluationReport
from interop.runs import run_of
from settings.load import dump, is_override, load_settings, setting_before_validation
from settings.script import run_main
from studies.subjects import open_runs
from training.logging.console import Console
from training.run.hardware import prepare_cpu


def main() -> int:
    assert __doc__
    options = parse("evaluate", __doc__)
    folders, overrides = split_runs(options.overrides)
    prepare_cpu(None)
    # a scheduler's SIGTERM saves like Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kind = kind_of(overrides)
    settings = load_settings(
        kind.settings_class, [*overrides, *(["matrix=true"] if options.matrix else [])]
    )
    # A dry run needs no other processes to estimate what each of them will take.
    with joined(1 if options.dry_run else getattr(settings, "context", 1)) as ranks:
        kind.check(settings.protocol, runs=len(folders), processes=ranks.world)
        # raises for a device that does not exist, before anything is read
        ranks.device(settings.device)
        console = Console(quiet=not ranks.main)
        results = []
        runs = open_runs(folders, settings, console)
        evaluation = kind(settings, runs, ranks, console)
        for run in runs:
            # methods, targets, cells already on disk
            session = evaluation.session(run, options.dry_run)
            if options.dry_run:
                session.forecast()
            else:
                results.append(session.run())  # score every method at every length
        if options.dry_run or not ranks.main:
            return 0
        report = evaluation.report(results, provenance())
        folder = folders[0] / "evaluation" / (settings.folder or report.name)
        files = report.write(folder)
        write_text(folder / "settings.yaml", dump(evaluation.settings))
        show(report, files, console, options.verbose)
    return 0


def split_runs(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """The run directories among the arguments, and the settings files and overrides."""
    settings = [word for word in arguments if word.endswith((".yaml", ".yml")) or is_override(word)]
    runs = [word for word in arguments if Path(word).is_dir() or word not in settings]
    if not runs:
        raise EvaluationError(f"RUN is missing: python evaluate.py RUN {shlex.join(arguments)}")
    return [run_of(run) for run in runs], [word for word in arguments if word not in runs]


def kind_of(overrides: list[str]) -> type[Evaluation]:
    """The kind of evaluation that `protocol` selects in settings files and overrides."""
    return kind_of_protocol(setting_before_validation(overrides, "protocol"))


def provenance() -> dict:
    """The command and date of this evaluation, for results.json."""
    command = shlex.join(["python", "evaluate.py", *sys.argv[1:]])
    return {"command": command, "finished": datetime.now(UTC).isoformat(timespec="seconds")}


def show(report: EvaluationReport, files: list[Path], console: Console, verbose: bool) -> None:
    """Print the summary, the tables and the names of the files."""
    for line in report.summary if report.headlines is None else report.headlines:
        print(printable(line))
    for table in report.tables:
        console.table(table.title, table.columns, [[c.text for c in row] for row in table.cells])
    footnotes = [*report.footnotes, *(report.details if verbose else [])]
    for line in [*footnotes, f"written: {', '.join(map(str, files))}"]:
        print(printable(line))


if __name__ == "__main__":
    run_main(main)
