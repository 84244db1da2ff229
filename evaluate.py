"""Evaluate a trained run at its trained length and beyond.

    python evaluate.py RUN                            as trained, and truncated to the trained length
    python evaluate.py RUN lengths=[256,512] methods=[trained,truncate,yarn] targets=128
    python evaluate.py RUN configs/evaluation/extension.yaml           with a settings file
    python evaluate.py RUN --matrix                   all applicable methods, in one table
    python evaluate.py RUN --verbose                  the whole summary below the table
    python evaluate.py A B C lengths=[256,512]        several runs on the same targets
    python evaluate.py RUN targets_by=repetition      also the read gain of repeated text
    python evaluate.py RUN --dry-run                  list the cells, estimate the memory
    python evaluate.py RUN configs/tasks/passkey.yaml          a task: accuracy by length and depth
    python evaluate.py hf:HuggingFaceTB/SmolLM2-135M  a model of Hugging Face: hub name or folder
    torchrun --nproc_per_node 2 evaluate.py RUN       on two processes (CPU) or two GPUs
    torchrun --nproc_per_node 2 evaluate.py RUN context=2 lengths=[262144]     sharing each window
    python evaluate.py --help                         every setting

`protocol` selects what is measured: the loss of text (fixed-targets, sliding, non-overlapping,
by-position), tasks, attention or generation. Each kind has its own settings.

--matrix tries every built-in context-extension method and keeps those that apply to the checkpoint:
legal for its scheme and weights, and different from the checkpoint as trained. In a checkpoint with
a pattern of layer kinds a method applies to each kind that accepts all of it; the other kinds stay
as trained, and a narrower window is kept. Custom overrides apply to patterns in the same way,
unless they name a kind: model.kinds.KIND.position.window=64. A cell that cannot exist, such as a
length past the end of a learned table, is printed as a dash with its reason. Methods use the
declared length of a window, the same for all its tokens, so prefilling a cache in chunks gives the
numbers of a single pass.

Several runs are compared with the first by paired differences on the same targets, as trained or
under each of `methods`. Runs with different tokenizers are compared per byte of the same text. The
results are written to the first run's folder.

--dry-run checks that the checkpoint and the text exist, lists the cells and estimates the
memory. A dry run skips the search for overlaps with the training text.

Results are written to RUN/evaluation/<folder>/: results.csv, results.json, summary.txt and figures.
Cells measured before are reused, so an interrupted evaluation continues where it stopped.
hf:FOLDER and hf:NAME are first converted to a run in runs/imported/, where their results are
written.

Several processes give the same numbers as one; rank 0 writes and prints. Windows are divided among
them. With context=N, N processes share each window, for lengths that do not fit into the memory of
one process: each reads 1/N of the tokens and holds the keys of one layer at a time.
"""

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from errors import EvaluationError
from evaluation.evaluation_settings import SETTINGS_CLASSES, settings_class
from evaluation.methods import builtin_methods
from settings.help import HelpTopics, SettingsParser
from settings.load import is_override, load_settings
from settings.script import run_main

TOPICS = HelpTopics(
    classes=SETTINGS_CLASSES,
    common="protocol lengths methods targets documents spans_per_document split bos "
    "contamination.check device",
    setting="contamination",
    choice="protocol",
    note=f"methods: {', '.join(builtin_methods())}, or your own",
)


def parser_of(usage: str | None) -> SettingsParser:
    """The options of evaluate.py."""
    parser = SettingsParser(usage, TOPICS)
    add = parser.add_argument
    add(
        "overrides",
        nargs="*",
        default=[],
        metavar="RUN | CONFIG.yaml | key=value",
    )
    add(
        "--matrix",
        action="store_true",
        help="evaluate every method that the checkpoint supports",
    )
    add(
        "--verbose",
        action="store_true",
        help="print the whole summary below the tables",
    )
    add(
        "--no-report",
        action="store_true",
        help="write only the numbers: results.json and results.csv",
    )
    add(
        "--dry-run",
        action="store_true",
        help="list the cells and estimate the memory",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation of the command line and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser_of(__doc__).parse(arguments, needs_arguments=True)
    runs, overrides = split_runs(options.overrides)
    if options.matrix:
        overrides.append("matrix=true")
    settings = load_settings(settings_class(overrides), overrides)

    # imported here: --help and errors in settings do not need torch
    from evaluation.evaluate_runs import run_evaluation, show
    from interop.imported_runs import run_of
    from model.devices import prepare_cpu

    prepare_cpu(None)
    # a scheduler's SIGTERM saves like Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command = shlex.join(["python", "evaluate.py", *arguments])
    folders = [run_of(run) for run in runs]
    output = run_evaluation(folders, settings, command, options.dry_run, options.no_report)
    if output is not None:
        show(output.report, output.files, options.verbose)
    return 0


def split_runs(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The runs among the arguments, and the settings files and overrides."""
    overrides = []
    runs = []
    for argument in arguments:
        is_setting = argument.endswith((".yaml", ".yml")) or is_override(argument)
        if is_setting and not Path(argument).is_dir():
            overrides.append(argument)
        else:
            runs.append(argument)
    if not runs:
        raise EvaluationError(f"RUN is missing: python evaluate.py RUN {shlex.join(arguments)}")
    return runs, overrides


if __name__ == "__main__":
    run_main(main)
