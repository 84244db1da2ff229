"""Train a grid of models, evaluate each of them past its trained length, and write one report.

    python study.py configs/studies/quick.yaml              train, evaluate and report
    python study.py configs/studies/quick.yaml              again: resume where it stopped
    python study.py configs/studies/quick.yaml --report     write the report of the finished cells
    python study.py configs/studies/quick.yaml --dry-run    list the cells, the remaining work and time
    python study.py configs/studies/quick.yaml --jobs 4     run four cells at a time, on CPU or GPUs
    python study.py configs/studies/quick.yaml report.baseline=none      override a setting

A study file:

    base: [configs/tiny.yaml, training.tokens=2M]      # files and overrides of train.py, for all cells
    grid:                                              # a cell is one label of every axis
      scheme:                                          # what is compared: label: files and overrides
        rope: [configs/position/rope.yaml]
        none: [configs/position/none.yaml]
        alibi: [configs/position/alibi.yaml]
      seed: [0, 1, 2]                                  # a list: values of the setting with the axis's name
    skip:
      - {scheme: alibi, seed: [1, 2]}                  # train alibi with one seed only
    variants:
      rope + yarn: {scheme: rope, method: yarn}        # a context-extension method on the runs of a scheme
    evaluations:                                       # calls of evaluate.py, by name
      held-out: {overrides: ["lengths=[256,1024,4096]", spans_per_document=4]}
      novels:                                          # on another corpus, prepared with the run's tokenizer
        data: ["data.source={name: files, path: novels}"]
        overrides: ["lengths=[256,1024,4096]"]
    report: {baseline: rope, primary: held-out, lengths: [1024, 4096]}

The study's directory, by default runs/studies/<name of the file>, contains

    study.yaml                    the resolved settings
    runs/scheme=rope,seed=0/ ...  one run directory per cell; reused if its settings are the same
    cells/, logs/                 the state of each cell; the output of its commands
    report.html, report.md        the report, with its figures in figures/ and its numbers in results.csv
    results.json                  all measurements: apart from `timing`, independent of interruptions
    study.log                     one line per event

A failed cell does not stop the others; the exit status is then 1. Overrides take precedence over
files wherever they appear, so an override in `base` also takes precedence over the files of the
grid.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data.files import write_text
from evaluation.scoring.methods import builtin_methods
from run_directory.console import Console
from settings.load import dump
from settings.script import run_main
from studies.grid import cells_of, running_order, select_cells
from studies.options import parse_options
from studies.results.stored import RESULTS, read_results, unfair_comparisons


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study that the command line names; returns the exit status."""
    assert __doc__
    options = parse_options(__doc__, arguments)
    console = Console()
    study = options.study
    folder = options.folder
    if study is None:
        print_report(read_results(folder), folder)
        return 0
    cells = cells_of(study)
    if options.report:
        print_report(stored_results(study, options.name, folder, cells), folder)
        return 0

    # these import torch, which --help and a mistyped setting do not need
    from interop.runs import with_imported_parent
    from studies.running.corpora import StudyCorpora
    from studies.running.forecast import print_forecast
    from studies.running.plan import StudyPlanner
    from studies.running.progress import StudyProgress
    from studies.running.runner import StudyRunner, lock_study
    from studies.running.slurm import write_array

    cells = [replace(cell, arguments=with_imported_parent(cell.arguments)) for cell in cells]
    selected = select_cells(cells, options.cell, options.only)
    is_one_cell = options.cell is not None
    planner = StudyPlanner(study, folder, builtin_methods())
    plans = planner.plan(selected if is_one_cell else cells)
    corpora = StudyCorpora(console, make=not options.dry_run)
    if options.dry_run:
        corpora.check(plans)
        print_forecast(plans, corpora, folder, options.jobs, console)
        return 0

    with lock_study(folder, shared=is_one_cell):
        corpora.check(plans)
        if not is_one_cell:
            write_text(folder / "study.yaml", dump(study))
        if options.slurm:
            script = write_array(
                folder,
                options.name,
                selected,
                options.command,
                options.sbatch,
            )
            print(f"sbatch {script}")
            console.info(
                f"when all {len(selected)} tasks have finished: python {options.command_line}"
            )
            return 0

        by_index = {plan.cell.index: plan for plan in plans}
        work = [by_index[cell.index] for cell in running_order(selected, study)]
        progress = StudyProgress(
            work,
            options.jobs,
            console,
            folder / "study.log",
        )
        received = StudyRunner(folder, work, corpora, progress, options).run()
        if not is_one_cell:  # otherwise the call that covers all cells gathers the results
            from studies.running.cell_record import gather

            results = gather(study, options.name, folder, cells)
            for line in unfair_comparisons(results["checks"]):
                console.warn(line)
            console.info(f"results: {folder / RESULTS}")
            if received is None and any(cell["evaluations"] for cell in results["cells"]):
                print_report(results, folder)
        return progress.report(received, options.repeat)


def stored_results(study, name: str, folder: Path, cells) -> dict:
    """The stored results of a study, under its present report settings and variants."""
    if (folder / "cells").is_dir():
        from studies.running.cell_record import gather

        return gather(study, name, folder, cells)
    results = read_results(folder)  # without the cells, as when it was copied alone
    results["study"] |= study.model_dump(mode="json", include={"report", "variants"})
    return results


def print_report(results: dict, folder: Path) -> None:
    from studies.report.study_report import write_report

    print(f"report: {write_report(results, folder)[0]}")


if __name__ == "__main__":
    run_main(main)
