"""What the scripts say: lines, warnings, progress with time left, tables; and how they end on an error.

A Console is passed as an argument and used by its methods alone, so data and evaluation need not know it.
Everything goes to standard error except tables, which are results.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.console import ConsoleRenderable, RichCast
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from training.files import is_disk_full

FRAMES = 4  # a second, of a live view
_PACKAGES = {"model", "data", "training", "evaluation", "interop", "studies"}


class Console:
    """Talks to a person at a terminal, or leaves readable lines in a log file.

    `quiet` keeps warnings and tables and drops the rest.  `interval` is the least time, in seconds, between
    two progress lines where there is no terminal.
    """

    def __init__(self, quiet: bool = False, interval: float = 10.0):
        self.quiet = quiet
        self.interval = interval
        self._screens: list[RichConsole] = []  # those that own the last lines of the terminal

    def say(self, text: str) -> None:
        """One line for whoever follows along."""
        if not self.quiet:
            self._line(text)

    def warn(self, text: str) -> None:
        """One line that should be read; shown also when quiet."""
        self._line(f"warning: {text}")

    def _line(self, text: str) -> None:
        if self._screens:
            self._screens[-1].print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, label: str, total: int | None, unit: str = "it"):
        """Progress over `total` units (None: unknown) as a context manager; its value has `.advance(n=1)`."""
        if self.quiet:
            yield _NoBar()
        elif sys.stderr.isatty() and not self._screens:
            bar = _RichBar(label, total, unit)
            with self._owned_by(bar.progress.console), bar.progress:
                yield bar
        else:
            bar = _LineBar(label, total, unit, self._line, self.interval)
            try:
                yield bar
            except BaseException:
                bar.close("stopped")
                raise
            bar.close("done")

    @contextmanager
    def live(self, view: ConsoleRenderable | RichCast) -> Iterator[Callable[[], None] | None]:
        """Keep `view` at the foot of the terminal, drawn anew at each call of what this yields, at most
        `FRAMES` times a second; lines go above it. None where there is no terminal to draw on."""
        screen = RichConsole(file=sys.stderr)
        if self.quiet or self._screens or not sys.stderr.isatty() or screen.is_dumb_terminal:
            yield None
            return
        with self._owned_by(screen), Live(view, console=screen, auto_refresh=False) as live:
            screen.show_cursor(True)  # a process that is killed cannot bring it back
            last = 0.0

            def draw() -> None:
                nonlocal last
                if (now := time.monotonic()) - last >= 1 / FRAMES:
                    last = now
                    live.refresh()

            yield draw

    @contextmanager
    def _owned_by(self, screen: RichConsole) -> Iterator[None]:
        self._screens.append(screen)
        try:
            yield
        finally:
            self._screens.remove(screen)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table on standard output; a column of numbers is right-aligned."""
        table = Table(title=title or None, title_justify="left", show_header=any(columns))
        for i, column in enumerate(columns):
            cells = [str(row[i]) for row in rows]
            table.add_column(column, justify="right" if cells and all(map(_numeric, cells)) else "left")
        for row in rows:
            table.add_row(*(str(cell).replace("[", r"\[") for cell in row))
        out = _Piped(file=sys.stdout, highlight=False)
        if not sys.stdout.isatty():  # a log file has no width, so nothing needs to be folded or cut
            out.width = max(out.width, RichConsole(width=1 << 16).measure(table).maximum)
        out.print(table)
        sys.stdout.flush()


class _Piped(RichConsole):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would leave with status 1; `run_main` knows better


def _numeric(cell: str) -> bool:
    first = cell.strip().replace(",", "").replace("%", "").split(" ")[0]
    try:
        float(first.lstrip("±<>=~≥≤"))
    except ValueError:
        return cell.strip() in ("", "-", "–", "—")
    return True


class _NoBar:
    def advance(self, n: float = 1) -> None:
        pass


class _RichBar:
    """A bar with percent, rate and time left on a terminal."""

    def __init__(self, label: str, total: int | None, unit: str):
        self.unit, self.done, self.start = unit, 0.0, time.monotonic()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.percentage:>3.0f}%" if total else "{task.completed:.0f}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            console=RichConsole(file=sys.stderr),
        )
        self.task = self.progress.add_task(label.replace("[", r"\["), total=total, rate="")

    def advance(self, n: float = 1) -> None:
        self.done += n
        seconds = max(time.monotonic() - self.start, 1e-9)
        self.progress.update(self.task, advance=n, rate=f"{_count(self.done / seconds)} {self.unit}/s")


class _LineBar:
    """The same as plain lines, at most one every `interval` seconds, and one at the end."""

    def __init__(self, label, total, unit, line: Callable[[str], None], interval: float):
        self.label, self.total, self.unit, self.line, self.interval = label, total, unit, line, interval
        self.done = 0.0
        self.start = self.last = time.monotonic()

    def advance(self, n: float = 1) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.last < self.interval or (self.total and self.done >= self.total):
            return
        self.last = now
        rate = self.done / max(now - self.start, 1e-9)
        text = f"{self.label}: {_count(self.done)} {self.unit}"
        if self.total:
            left = (self.total - self.done) / rate if rate else 0.0
            text = (
                f"{self.label}: {100 * self.done / self.total:.0f}% "
                f"({_count(self.done)} of {_count(self.total)} {self.unit})"
            )
            self.line(f"{text}, {_count(rate)} {self.unit}/s, {duration(left)} left")
        else:
            self.line(f"{text}, {_count(rate)} {self.unit}/s")

    def close(self, word: str) -> None:
        seconds = time.monotonic() - self.start
        rate = self.done / max(seconds, 1e-9)
        self.line(
            f"{self.label}: {word}, {_count(self.done)} {self.unit} in {duration(seconds)}"
            + (f" ({_count(rate)} {self.unit}/s)" if self.done else "")
        )


def _count(number: float) -> str:
    """1234567 -> 1.23M; small numbers keep one decimal only where they are not whole."""
    for power, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= power:
            return f"{number / (1e3 if suffix == 'k' else power):.3g}{suffix}"
    return f"{number:.0f}" if number == int(number) or number >= 100 else f"{number:.1f}"


def duration(seconds: float) -> str:
    """12.3 -> `12 s`, 100 -> `1 min 40 s`, 7300 -> `2 h 1 min`, 1e6 -> `12 days`, 1e9 -> `32 years`."""
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


def is_user_error(error: BaseException) -> bool:
    """Whether an error speaks to the user: a house error class, or the operating system about a file.

    House errors are ValueError subclasses named ...Error in one of the packages; they are known by module,
    as this package may not import all of theirs.
    """
    if isinstance(error, OSError):
        return True
    return isinstance(error, ValueError) and any(
        cls.__module__.split(".")[0] in _PACKAGES and cls.__name__.endswith("Error")
        for cls in type(error).__mro__
    )


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        mend = "; make room, then run the same command again" if is_disk_full(error) else ""
        return f"{' -> '.join(names)}: {error.strerror}{mend}" if names else error.strerror + mend
    return str(error) or type(error).__name__


def run_main(main: Callable[[], int | None]) -> None:
    """Call a script's main and leave with its status: 2 after `error: ...` for a user error, 130 for Ctrl-C.

    Any other exception keeps its traceback: it is a bug and should look like one.
    """
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has left. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not is_user_error(error):
            raise
        rank = os.environ.get("RANK", "0")
        print(
            f"error: {'' if rank == '0' else f'(process {rank}) '}{_words(error)}",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(2)
    sys.exit(status or 0)
