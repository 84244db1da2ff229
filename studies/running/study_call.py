"""What a call of study.py gives to every study that it runs."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from run_directory.console import Console
from studies.running.corpora import StudyCorpora


@dataclass(frozen=True)
class StudyCall:
    """The options of the command line, and functions of scripts and packages above this one.

    Attributes:
        with_parent: imports a foreign `parent.run` among the arguments of train.py.
    """

    options: Namespace
    console: Console
    with_parent: Callable[[Sequence[str]], Sequence[str]]

    @cached_property
    def corpora(self) -> StudyCorpora:
        """The text of all cells, prepared unless no cell will run."""
        options = self.options
        is_list = options.claims and not options.all
        only_reads = options.dry_run or options.report or is_list
        return StudyCorpora(self.console, make=not only_reads)
