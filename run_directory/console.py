"""Console output of the scripts: lines, warnings, progress bars and tables.

A Console is passed as an argument and used through its methods only, so data and evaluation do not
import it. Everything goes to standard error, except tables that are the result of a script.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from errors import printable

INTERVAL = 10.0  # seconds between two progress lines without a terminal


class Console:
    """Prints to a terminal, or writes readable lines to a log file.

    `quiet` prints only warnings and tables. `results`: tables are the result of the script and go
    to standard output.
    """

    def __init__(self, quiet: bool = False, results: bool = True):
        self.quiet = quiet
        self.results = results
        self._screen: RichConsole | None = None  # the screen of a progress bar

    def info(self, text: str) -> None:
        """Print one line, unless quiet."""
        if not self.quiet:
            self._line(text)

    def warn(self, text: str) -> None:
        """Print a warning, even if quiet."""
        self._line(f"warning: {text}")

    def _line(self, text: str) -> None:
        text = printable(text)
        if self._screen is not None:
            self._screen.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, label: str, total: int | None, unit: str = "it") -> Iterator["Counter"]:
        """Show progress over `total` units (None: unknown) in the block; yields the counter."""
        if self.quiet:
            yield Counter()
        elif sys.stderr.isatty() and self._screen is None:
            with Progress(console=RichConsole(file=sys.stderr)) as progress:
                task = progress.add_task(escape(printable(label)), total=total)
                self._screen = progress.console
                try:
                    yield Counter(lambda counter: progress.update(task, completed=counter.done))
                finally:
                    self._screen = None
        else:
            counter = Counter(lambda counter: self._progress_line(counter, label, total, unit))
            yield counter
            self._line(
                f"{label}: {counter.done:,.0f} {unit} in "
                f"{duration(time.monotonic() - counter.start)}"
            )

    def _progress_line(self, counter: "Counter", label: str, total: int | None, unit: str) -> None:
        """Print the progress, at most once every INTERVAL seconds."""
        now = time.monotonic()
        if now - counter.last_shown < INTERVAL or (total and counter.done >= total):
            return
        counter.last_shown = now
        share = f"{counter.done:,.0f} {unit}"
        if total:
            left = duration((total - counter.done) / counter.rate)
            share = f"{counter.done / total:.0%} of {total:,.0f} {unit}, {left} left"
        rate = f"{counter.rate:,.0f}" if counter.rate >= 10 else f"{counter.rate:.2g}"
        self._line(f"{label}: {share}, {rate} {unit}/s")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table; numeric columns are right-aligned."""
        stream = sys.stdout if self.results else sys.stderr
        table = Table(
            title=printable(title) or None, title_justify="left", show_header=any(columns)
        )
        for i, column in enumerate(columns):
            cells = [str(row[i]) for row in rows]
            table.add_column(
                printable(column),
                justify="right" if cells and all(map(_numeric, cells)) else "left",
            )
        for row in rows:
            table.add_row(*(escape(printable(str(cell))) for cell in row))
        out = _Piped(file=stream, highlight=False)
        if not stream.isatty():  # a log file has no width, so nothing is wrapped or truncated
            out.width = max(out.width, RichConsole(width=1 << 16).measure(table).maximum)
        out.print(table)
        stream.flush()


class _Piped(RichConsole):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with status 1; `run_main` handles it


def _numeric(cell: str) -> bool:
    first = cell.strip().replace(",", "").replace("%", "").split(" ")[0]
    try:
        float(first.lstrip("±<>=~≥≤−"))
    except ValueError:
        return cell.strip() in ("", "-", "–", "—")
    return True


class Counter:
    """Counts finished units of work."""

    def __init__(self, show: Callable[["Counter"], object] = lambda counter: None):
        self.done = 0.0
        self.start = time.monotonic()
        self.last_shown = self.start
        self._show = show

    def advance(self, n: float = 1) -> None:
        self.done += n
        self._show(self)

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.done / max(time.monotonic() - self.start, 1e-9)


def duration(seconds: float) -> str:
    """Format 12.3 as `12 s`, 100 as `1 min 40 s`, 7300 as `2 h 1 min`, 1e6 as `12 days`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 100 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    days = whole / 86_400
    return f"{days:.0f} days" if days < 730 else f"{days / 365.25:,.0f} years"
