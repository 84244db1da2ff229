"""What a call of study.py gives to every study that it runs."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from run_directory.console import Console


@dataclass(frozen=True)
class StudyCall:
    """The options of the command line, and functions of scripts and packages above this one.

    Attributes:
        train: `main` of train.py.
        with_parent: imports a foreign `parent.run` among the arguments of train.py.
    """

    options: Namespace
    console: Console
    train: Callable[[Sequence[str]], int]
    with_parent: Callable[[Sequence[str]], Sequence[str]]
