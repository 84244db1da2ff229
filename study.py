"""Train a grid of models, evaluate each of them past its trained length, and write one report.

    python study.py configs/studies/quick.yaml              train, evaluate and report
    python study.py configs/studies/quick.yaml              again: resume where it stopped
    python study.py configs/studies/quick.yaml --report     rewrite the report from results.json
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
    runs/scheme=rope,seed=0/ ...  one run directory per cell; an existing run with the same settings is reused
    cells/, logs/                 the state of each cell; the output of its commands
    report.html, report.md        the report, with its figures in figures/ and its numbers in results.csv
    results.json                  all measurements: apart from `timing`, independent of interruptions
    study.log                     one line per event

A failed cell does not stop the others; the exit status is then 1. Overrides take precedence over files
wherever they appear, so an override in `base` also takes precedence over the files of the grid.
"""

from settings.command_line import answer_quickly

if __name__ == "__main__":
    answer_quickly(__doc__)  # prints help and misspelled settings before torch is imported

from dataclasses import replace

from data.files import write_text
from evaluate import kind_of
from evaluation import read_methods
from evaluation.scoring.methods import BUILTIN as METHODS
from interop.runs import with_imported_parent
from settings.load import dump
from settings.script import run_main
from studies.options import parse_options
from studies.report.report import write_report
from studies.results.stored import RESULTS, read_results, unfair_comparisons
from studies.running.forecast import print_forecast
from studies.running.grid import cells_of, running_order, select_cells
from studies.running.plan import StudyPlanner
from studies.running.progress import StudyProgress
from studies.running.records import gather
from studies.running.runner import StudyRunner, lock_study
from studies.running.slurm import write_array
from studies.running.texts import StudyTexts
from training.logging.console import Console


def main() -> int:
    assert __doc__
    options = parse_options(__doc__)
    console = Console()
    study = options.study
    folder = options.folder
    if options.report or study is None:
        return report(folder, study)

    cells = [
        replace(cell, arguments=with_imported_parent(cell.arguments)) for cell in cells_of(study)
    ]
    selected = select_cells(cells, options.cell, options.only)
    one_cell = options.cell is not None
    planner = StudyPlanner(study, folder, kind_of, read_methods(METHODS))
    plans = planner.plan(selected if one_cell else cells)
    if options.dry_run:
        texts = StudyTexts(console, make=False)
        texts.check(plans)
        print_forecast(plans, texts, folder, options.jobs, console)
        return 0

    with lock_study(folder, shared=one_cell):
        texts = StudyTexts(console)
        texts.check(plans)
        if not one_cell:
            write_text(folder / "study.yaml", dump(study))
        if options.slurm:
            script = write_array(folder, options.name, selected, options.command, options.sbatch)
            print(f"sbatch {script}")
            console.info(
                f"when all {len(selected)} tasks have finished: python {options.command_line}"
            )
            return 0

        by_index = {plan.cell.index: plan for plan in plans}
        work = [by_index[cell.index] for cell in running_order(selected, study)]
        progress = StudyProgress(work, options.jobs, console, folder / "study.log")
        runner = StudyRunner(folder, work, texts, progress, options)
        if one_cell:  # the call that covers all cells gathers the results
            return progress.report(runner.run(), options.repeat)
        received = runner.run(after_cell=lambda: gather(study, options.name, folder, plans))
        results = gather(study, options.name, folder, plans)
        for line in unfair_comparisons(results["checks"]):
            console.warn(line)
        status = progress.report(received, options.repeat)
        console.info(f"results: {folder / RESULTS}")
        if received is None and any(cell["evaluations"] for cell in results["cells"]):
            report(folder)
        return status


def report(folder, study=None) -> int:
    """Write the report from results.json; `study` replaces the report settings and variants stored there."""
    results = read_results(folder)
    if study is not None:
        results["study"] |= study.model_dump(mode="json", include={"report", "variants"})
    print(f"report: {write_report(results, folder)[0]}")
    return 0


if __name__ == "__main__":
    run_main(main)
