"""The command line of study.py."""

import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from data.files import path_problem
from errors import StudyError
from settings.help import HelpTopics, SettingsParser
from settings.load import load_settings, setting_before_validation, split_arguments
from settings.script import at_least
from studies.claims.claim_settings import ClaimSettings
from studies.study_settings import StudySettings

TOPICS = HelpTopics(
    classes=[StudySettings],
    common="base grid skip variants evaluations report.baseline report.primary report.lengths "
    "report.tolerance",
    setting="grid",
    choice="report",
)


def parser_of(usage: str) -> SettingsParser:
    """The options of study.py."""
    parser = SettingsParser(usage, TOPICS)
    add = parser.add_argument
    add("overrides", nargs="*", default=[], metavar="STUDY.yaml | key=value")
    add(
        "--run-dir",
        metavar="DIR",
        help="default: runs/studies/<name of the file>",
    )
    add(
        "--jobs",
        type=at_least(1),
        metavar="N",
        help="cells to run at a time (default: one per GPU, or one)",
    )
    add(
        "--hours",
        type=float,
        metavar="H",
        help="start only cells expected to finish within H hours; run again for the others",
    )
    add(
        "--only",
        metavar="PATTERN",
        help="run only the cells whose name matches, e.g. 'scheme=rope,*'",
    )
    add(
        "--pilot",
        type=int,
        default=0,
        metavar="N",
        help="for a claim: run it on seeds 0 to N-1, which do not count, and print the values",
    )
    add("--all", action="store_true", help="for `claims`: run unfinished claims, cheapest first")
    add("--publish", action="store_true", help="for `claims`: copy results and write docs/atlas.md")
    add(
        "--report",
        action="store_true",
        help="write the report of the finished cells, without running any, and exit",
    )
    add(
        "--list",
        action="store_true",
        help="prepare the text, print the unfinished commands, and exit",
    )
    add(
        "--launcher",
        choices=["slurm"],
        help="submit each cell as a job (requires submitit) instead of running it, and exit",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the cells and their unfinished parts, and exit",
    )
    return parser


def study_of(arguments: Sequence[str]) -> StudySettings:
    """The settings of a study; overrides of train.py, such as training.tokens=1M, are added to
    `base`."""
    from run_directory.run_settings import RunSettings  # imported here: --help does not need torch

    known = RunSettings.model_fields.keys() - StudySettings.model_fields.keys()
    of_runs = [word for word in arguments if re.split(r"[.=]", word)[0] in known and "=" in word]
    own = [word for word in arguments if word not in of_runs]
    is_claim = setting_before_validation(own, "statement") is not None
    study = load_settings(ClaimSettings if is_claim else StudySettings, own)
    return study.model_copy(update={"base": [*study.base, *of_runs]})


def parse_options(usage: str, arguments: Sequence[str] | None = None) -> Namespace:
    """Parse and validate the command line.

    Besides argparse's own attributes, the result has `study` (the settings, or None), `file`,
    `folder` (the study's directory), `name` and `repeat` (this command line).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser_of(usage).parse(arguments)
    options.repeat = shlex.join(["python", "study.py", *arguments])
    options.claims = options.overrides == ["claims"]
    if options.claims:
        return options
    if not options.overrides and not options.report:
        raise StudyError(
            "no study file given; for example: python study.py configs/studies/quick.yaml"
        )
    files, _ = split_arguments(options.overrides)
    options.study = study_of(options.overrides) if options.overrides else None
    options.file = Path(files[0]) if files else None
    options.name = Path(files[0]).stem if files else "study"
    options.folder = Path(options.run_dir or Path("runs", "studies", options.name))
    if problem := path_problem(options.folder / "study.yaml"):
        raise StudyError(f"--run-dir={options.folder} {problem}")
    return options
