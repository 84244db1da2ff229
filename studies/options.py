"""The command line of study.py."""

import shlex
import sys
from argparse import Namespace
from pathlib import Path

from errors import StudyError
from settings.command_line import parse
from settings.load import load_settings, split_arguments
from studies.running.runner import gpus
from studies.study_settings import StudySettings


def parse_options(usage: str) -> Namespace:
    """Parse and validate the command line.

    Beside argparse's own attributes the result has `study` (the settings, or None), `folder` (the study's
    directory), `name`, `command` (arguments of each SLURM task) and `repeat` (this command line).
    """
    options = parse("study", usage)
    if options.jobs is None:
        options.jobs = max(1, len(gpus()))
    if options.jobs < 1:
        raise StudyError(f"--jobs must be at least 1, got {options.jobs}")
    if not options.overrides and not options.report:
        raise StudyError(
            "no study file given; for example: python study.py configs/studies/quick.yaml"
        )
    options.study = load_settings(StudySettings, options.overrides) if options.overrides else None
    files, _ = split_arguments(options.overrides)
    options.name = Path(files[0]).stem if files else "study"
    options.folder = Path(options.run_dir or Path("runs", "studies", options.name))
    if options.partition:
        options.sbatch.insert(0, f"--partition={options.partition}")
    options.command = ["study.py", *options.overrides, "--run-dir", str(options.folder)]
    options.command_line = shlex.join(options.command)
    options.repeat = shlex.join(["python", "study.py", *sys.argv[1:]])
    return options
