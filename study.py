"""Train a grid of models, evaluate each of them past its trained length, and write one report.

    python study.py configs/studies/quick.yaml              train, evaluate and report
    python study.py configs/studies/quick.yaml              again: resume where it stopped
    python study.py configs/studies/quick.yaml --report     write the report of the finished cells
    python study.py configs/studies/quick.yaml --dry-run    list the cells, the remaining work and time
    python study.py configs/studies/quick.yaml --list       print the unfinished commands, for a shell
    python study.py configs/studies/quick.yaml --jobs 4     run four cells at a time, on CPU or GPUs
    python study.py configs/studies/quick.yaml --hours 8    start only cells expected to finish in time
    python study.py configs/studies/quick.yaml report.baseline=none      override a setting

A study file:

    base: [configs/tiny.yaml, training.tokens=2M]      # files and overrides of train.py, for all cells
    grid:                                              # a cell is one label of every axis
      scheme:                                          # the compared axis: label: files and overrides
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
    runs/scheme=rope,seed=0/ ...  one run directory per cell: the only record of progress
    logs/                         the output of each cell
    report.html, report.md        the report, with its figures in figures/ and its numbers in results.csv
    results.json                  all measurements: apart from `timing`, independent of interruptions
    times.jsonl                   the seconds of each command that ran, and its error

A study is a list of commands: `--list` prints them, one per line, to run in a shell, in GNU
parallel or as jobs; the commands of one cell must run in order. `--launcher slurm` submits each
cell as a job; SBATCH_PARTITION and other variables of sbatch select its resources. The same command
on several machines with a common folder divides the cells among them, as in `sbatch --array=1-8`. A
failed cell does not stop the others; the exit status is then 1. Overrides take precedence over
files wherever they appear, so an override in `base` also takes precedence over the files of the
grid.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from errors import UserError, printable
from run_directory.console import Console
from settings.script import run_main
from studies.claims.claim_settings import ClaimSettings
from studies.study_options import parse_options
from studies.study_results_reader import RESULTS, read_results, read_study

if TYPE_CHECKING:
    from studies.study_run import StudyCall


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study of the command line and return the exit status."""
    assert __doc__
    options = parse_options(__doc__, arguments)
    if options.claims or isinstance(options.study, ClaimSettings):
        return claims(options)
    if options.study is None:
        print_report(read_results(options.folder), options.folder)
    elif options.report:
        print_report(stored_results(options), options.folder)
    else:
        return run_study(options)
    return 0


def claims(options: Namespace) -> int:
    """List or run claims. Returns the exit status."""
    from studies.claims.claim_run import Claim
    from studies.claims.command import run_claim, run_claims

    call = study_call(options)
    if options.claims:
        return run_claims(call)
    return run_claim(Claim(options.file, options.study), call)


def study_call(options: Namespace) -> "StudyCall":
    # imported here: --help and errors in settings do not need torch
    from interop.imported_runs import with_imported_parent
    from studies.cell_pool import gpus
    from studies.study_run import StudyCall

    options.jobs = options.jobs or max(1, len(gpus()))
    console = Console(results=not options.list)  # with --list the commands are the only result
    return StudyCall(options, console, with_imported_parent)


def run_study(options: Namespace) -> int:
    """Run the study, or print or submit its commands. Returns the exit status."""
    from studies.study_run import StudyRun

    call = study_call(options)
    folder = options.folder
    run = StudyRun(options.study, options.name, folder, call)
    pool = run.run()
    if pool is None:
        return 0
    results = run.gather()
    for line in read_study(results).unfair:
        call.console.warn(line)
    call.console.info(f"results: {folder / RESULTS}")
    if pool.received is None and any(cell["evaluations"] for cell in results["cells"]):
        print_report(results, folder)
    return pool.report(options.repeat)


def stored_results(options: Namespace) -> dict:
    """The results of a study with its current report settings and variants."""
    study = options.study
    if (options.folder / "runs").is_dir():
        from studies.study_run import StudyRun

        call = study_call(options)
        try:
            run = StudyRun(study, options.name, options.folder, call)
            run.prepare()
            return run.gather()
        except UserError as error:  # for example a missing text
            call.console.warn(f"the report is of {options.folder / RESULTS} as it is: {error}")
    results = read_results(options.folder)  # needs only results.json, not the runs
    results["study"] |= study.model_dump(mode="json", include={"report", "variants"})
    return results


def print_report(results: dict, folder: Path) -> None:
    from evaluation.reports.document import print_table
    from studies.study_report import write_report

    table, findings = write_report(results, folder)
    if table is not None:
        print_table(table)
    for line in [*findings[:1], f"report: {folder / 'report.html'}"]:
        print(printable(line))


if __name__ == "__main__":
    run_main(main)
