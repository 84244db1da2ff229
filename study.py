"""Train a grid of models, measure each past its trained length, and put it all into one report.

    python study.py configs/studies/quick.yaml              everything: train, evaluate, gather
    python study.py configs/studies/quick.yaml              ... again: goes on where it was stopped
    python study.py configs/studies/quick.yaml --report     the report again, from results.json alone
    python study.py configs/studies/quick.yaml --dry-run    what it would do, what is done, how long it takes
    python study.py configs/studies/quick.yaml --jobs 4     four cells at a time, on the CPU or over the GPUs
    python study.py configs/studies/quick.yaml report.baseline=none      settings laid over the file

A study file:

    base: [configs/tiny.yaml, training.tokens=2M]      # files and words of train.py, under every cell
    grid:                                              # a cell takes one label of every axis
      scheme:                                          # what is compared: label: files and words of train.py
        rope: [configs/position/rope.yaml]
        none: [configs/position/none.yaml]
        alibi: [configs/position/alibi.yaml]
      seed: [0, 1, 2]                                  # a list: values of the setting it is named after
    skip:
      - {scheme: alibi, seed: [1, 2]}                  # one seed only
    variants:
      rope + yarn: {scheme: rope, rule: yarn}          # a test-time rule on the runs of a scheme
    evaluations:                                       # calls of evaluate.py, by name
      held-out: {words: ["lengths=[256,1024,4096]", spans_per_document=4]}
      novels:                                          # on other text, prepared with the run's tokenizer
        data: ["data.source={name: files, path: novels}"]
        words: ["lengths=[256,1024,4096]"]
    report: {baseline: rope, primary: held-out, lengths: [1024, 4096]}

The folder of a study, by default runs/studies/<name of the file>, holds

    study.yaml            the settings, resolved
    runs/scheme=rope,seed=0/ ...  the run of each cell, as train.py makes it: one that is there already is
                          taken over, if its settings are the cell's
    cells/, logs/         how far each cell is; what its commands said
    report.html ...       the report, also as report.md and results.csv, with its figures in figures/
    results.json          everything that was measured: `timing` aside, the same however often it was stopped
    study.log             one line per event

A cell that fails is reported and does not stop the others; the exit status is then 1. Words beat files
wherever they stand, so a word in `base` also beats the files of the grid.
"""

import argparse
import fnmatch
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from data.files import write_text
from evaluate import RULES, kind_of
from evaluation import read_rules
from studies.errors import StudyError
from studies.forecast import show
from studies.gather import RESULTS, disagreements, gather, read_results
from studies.grid import Cell, cells_of, in_running_order
from studies.lock import alone
from studies.plan import Planner
from studies.progress import FAILED, Progress
from studies.report import write_report
from studies.runner import How, Runner, gpus
from studies.settings import StudySettings
from studies.slurm import write_array
from studies.texts import Texts
from training.config import dump, load_settings, split_words
from training.console import Console, run_main
from training.describe import help_text


def main() -> int:
    options = parse()
    study = load_settings(StudySettings, options.words) if options.words else None
    files, _ = split_words(options.words)
    name = Path(files[0]).stem if files else "study"
    folder = Path(options.folder) if options.folder else Path("runs") / "studies" / name
    if options.report:
        return report(folder, study)
    if study is None:
        raise StudyError("which study? e.g. python study.py configs/studies/quick.yaml; --help says more")
    console, cells = Console(), cells_of(study)
    chosen = [one_of(cells, options.cell)] if options.cell is not None else only(cells, options.only)
    planner = Planner(study, folder, kind_of, read_rules(RULES))
    plans = planner.plan(cells if options.cell is None else chosen)
    if options.dry_run:
        texts = Texts(console, make=False)
        texts.check(plans)
        show(plans, texts, folder, options.jobs, console)
        return 0
    with alone(folder, shared=options.cell is not None):
        texts = Texts(console)
        texts.check(plans)
        if options.cell is None:
            write_text(folder / "study.yaml", dump(study))
        if options.slurm:
            return slurm(options, folder, name, chosen, console)
        asked = {cell.index for cell in chosen}
        work = [plan for plan in plans if plan.cell.index in asked]
        work = sorted(work, key=lambda plan: in_running_order(cells, study).index(plan.cell))
        progress = Progress(work, options.jobs, console, folder / "study.log")
        how = How(options.jobs, train=not options.no_training, again=options.evaluate_again)
        runner = Runner(folder, work, texts, how, progress)
        if options.cell is not None:  # results are gathered by the call that sees all cells
            return status_of(runner.run(lambda: None), progress, options, console)
        received = runner.run(lambda: gather(study, name, folder, plans))
        results = gather(study, name, folder, plans)
        for line in disagreements(results):
            console.warn(line)
        status = status_of(received, progress, options, console)
        console.say(f"numbers: {folder / RESULTS}")
        if received is None and any(cell["evaluations"] for cell in results["cells"]):
            report(folder, None)
        return status


def parse() -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    parser.add_argument("words", nargs="*", metavar="STUDY.yaml | key.inner=value")
    parser.add_argument("--folder", metavar="FOLDER", help="of the study; by default runs/studies/<file>")
    parser.add_argument(
        "--jobs", type=int, default=max(1, len(gpus())), help="cells at a time (default: one a GPU, or one)"
    )
    parser.add_argument("--only", metavar="PATTERN", help="only these cells, e.g. 'scheme=rope,*'")
    parser.add_argument("--no-training", action="store_true", help="evaluate what is trained; the rest waits")
    parser.add_argument(
        "--evaluate-again", action="store_true", help="call evaluate.py again; what it measured is reused"
    )
    parser.add_argument(
        "--report", action="store_true", help="write the report of --folder's results.json; run nothing"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan; start nothing")
    parser.add_argument("--cell", type=int, metavar="INDEX", help="work on one cell only, gather nothing")
    parser.add_argument(
        "--slurm",
        action="store_true",
        help="write an array script with one task a cell, and how to submit it",
    )
    parser.add_argument("--partition", help="of the array script")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="another of its options: --sbatch=--time=2:00:00",
    )
    more = "this text, with every setting; --help SETTING: that setting and those inside it alone"
    parser.add_argument("-h", "--help", action="store_true", help=more)
    options = parser.parse_intermixed_args()
    if options.help:
        print(help_text(StudySettings, options.words, parser.format_help(), "grid"))
        sys.exit(0)
    if options.jobs < 1:
        raise StudyError(f"--jobs must be at least 1, got {options.jobs}")
    return options


def report(folder: Path, study: StudySettings | None) -> int:
    """Write the report from the stored results, as they were declared or as the study file declares now."""
    results = read_results(folder)
    if study is not None:
        declared = study.model_dump(mode="json", include={"report", "variants"})
        results["study"] = results["study"] | declared
    files = write_report(results, folder)
    print(f"report: {files[0]}")
    return 0


def one_of(cells: Sequence[Cell], index: int) -> Cell:
    for cell in cells:
        if cell.index == index:
            return cell
    raise StudyError(f"--cell {index}: the cells are 0 to {len(cells) - 1}; --dry-run lists them")


def only(cells: list[Cell], pattern: str | None) -> list[Cell]:
    found = [cell for cell in cells if pattern is None or fnmatch.fnmatchcase(cell.id, pattern)]
    if not found:
        raise StudyError(f"--only {pattern}: no cell is called so; the first is {cells[0].id}")
    return found


def slurm(options: argparse.Namespace, folder: Path, name: str, cells: list[Cell], console: Console) -> int:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    wanted = [f"--partition={options.partition}"] if options.partition else []
    again = ["study.py", *options.words, "--folder", str(folder)]
    script = write_array(folder, name, cells, again, [*wanted, *options.sbatch])
    console.say(f"{len(cells)} tasks; text is prepared. Afterwards: python {shlex.join(again)}")
    print(f"sbatch {script}")
    return 0


def status_of(received, progress: Progress, options: argparse.Namespace, console: Console) -> int:
    """Say how it ended; 0 all done, 1 some cell failed, 128 + the signal that stopped it."""
    console.say(progress.summary())
    again = shlex.join(["python", "study.py", *sys.argv[1:]])
    if received is not None:
        console.say(f"stopped by {received.name}; goes on with: {again}")
        return 128 + received
    for text in progress.failures():
        console.warn(text)
    if progress.count(FAILED):
        console.say(f"failed cells are tried again by: {again}")
        return 1
    return 0


if __name__ == "__main__":
    run_main(main)
