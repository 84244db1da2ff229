"""Console output of the scripts: lines, warnings, progress bars and tables.

A Console is passed as an argument and used through its methods only, so data and evaluation do not
import it. Everything goes to standard error, except tables that are the result of a script.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from errors import printable


class Console:
    """Prints to a terminal, or writes readable lines to a log file.

    `quiet` prints only warnings and tables. `interval` is the minimum time, in seconds, between two
    progress lines without a terminal. `results`: tables are the result of the script and go to
    standard output.
    """

    def __init__(self, quiet: bool = False, interval: float = 10.0, results: bool = True):
        self.quiet = quiet
        self.results = results
        self.interval = interval
        self._screen: RichConsole | None = None  # that of a progress bar

    def info(self, text: str) -> None:
        """Print one line, unless quiet."""
        if not self.quiet:
            self._line(text)

    def warn(self, text: str) -> None:
        """Print a warning, also when quiet."""
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
            progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=28),
                TextColumn("{task.percentage:>3.0f}%" if total else "{task.completed:.0f}"),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(compact=True),
                console=RichConsole(file=sys.stderr),
            )
            task = progress.add_task(printable(label).replace("[", r"\["), total=total, rate="")
            self._screen = progress.console
            try:
                with progress:
                    yield Counter(
                        lambda counter: progress.update(
                            task, completed=counter.done, rate=f"{_count(counter.rate)} {unit}/s"
                        )
                    )
            finally:
                self._screen = None
        else:
            counter = Counter(lambda counter: self._progress_line(counter, label, total, unit))
            end = "stopped"
            try:
                yield counter
                end = "done"
            finally:
                rate = f" ({_count(counter.rate)} {unit}/s)" if counter.done else ""
                self._line(
                    f"{label}: {end}, {_count(counter.done)} {unit} in "
                    f"{duration(time.monotonic() - counter.start)}{rate}"
                )

    def _progress_line(self, counter: "Counter", label: str, total: int | None, unit: str) -> None:
        """Print the progress, at most once every `interval` seconds."""
        now = time.monotonic()
        if now - counter.last_shown < self.interval or (total and counter.done >= total):
            return
        counter.last_shown = now
        share = f"{_count(counter.done)} {unit}"
        left = ""
        if total:
            share = f"{counter.done / total:.0%} ({_count(counter.done)} of {_count(total)} {unit})"
            left = f", {duration((total - counter.done) / counter.rate)} left"
        self._line(f"{label}: {share}, {_count(counter.rate)} {unit}/s{left}")

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
            table.add_row(*(printable(str(cell)).replace("[", r"\[") for cell in row))
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


def _count(number: float) -> str:
    """Format 1234567 as 1.23M; small numbers have one decimal only if they are not whole."""
    for power, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= power:
            return f"{number / (1e3 if suffix == 'k' else power):.3g}{suffix}"
    return f"{number:.0f}" if number == int(number) or number >= 100 else f"{number:.1f}"


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
