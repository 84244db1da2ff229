"""Entry point of the scripts: argument parser, standard streams that cannot fail, and exit
statuses."""

import argparse
import difflib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence

from errors import TrainingError, UserError, is_disk_full, printable


class _Droppable(io.FileIO):
    """Standard error whose writes never fail. Text that cannot be written is dropped, so a closed
    pipe or terminal or a full disk does not stop the script."""

    def write(self, data, /) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def message_of(error: BaseException) -> str:
    """The text that a script prints after `error: ` for a user error or an OSError."""
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        fix = "; free space, then run the same command again" if is_disk_full(error) else ""
        return ": ".join(filter(None, [" -> ".join(names), error.strerror])) + fix
    return str(error) or type(error).__name__


def at_least(minimum: int) -> Callable[[str], int]:
    """The `type` of an option that is an integer of at least `minimum`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    return integer


class Parser(argparse.ArgumentParser):
    """Argument parser of every script: overrides may come before and after an option, options
    cannot be abbreviated, and `run_main` reports its errors like all others."""

    def __init__(self, description: str | None, add_help: bool = True):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=add_help,
            allow_abbrev=False,
        )

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # pyright: ignore
        return self.parse_intermixed_args(args)

    def error(self, message: str):
        setting = re.match(r"unrecognized arguments: -+([\w.]*[.=]\S*)", message)
        advice = f"{self.prog} --help lists all options"
        if setting:
            advice = f"write settings as key=value, without dashes: {setting[1]}"
        elif unknown := re.match(r"unrecognized arguments: --?([\w-]+)", message):
            advice = self.advice(unknown[1]) + advice
        raise TrainingError(f"{message}; {advice}")

    def advice(self, unknown: str) -> str:
        """What an unknown option probably means, to be followed by other advice."""
        options = re.findall(r"--[\w-]+", self.format_usage())
        longer = [name for name in options if name.startswith(f"--{unknown}")]
        close = longer or difflib.get_close_matches(f"--{unknown}", options, n=1, cutoff=0.7)
        return f"did you mean {close[0]}? " if close else ""


def _secure_streams() -> None:
    """Replace closed standard streams with the null device, and make writes to standard error never
    fail."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
    if sys.stderr is sys.__stderr__:
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_Droppable(sys.stderr.fileno(), "w", closefd=False)),
            sys.stderr.encoding,
            "backslashreplace",
            line_buffering=True,
        )


def _discard_output() -> None:
    """Drop standard output that could not be written; otherwise the flush at exit fails again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_main(main: Callable[[], int | None]) -> None:
    """Call a script's main and exit with its status: 2 after `error: ...` for a user error, 130 for
    Ctrl-C.

    Any other exception is a bug and keeps its traceback. Messages that cannot be printed are
    dropped.
    """
    _secure_streams()
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()  # the reader of a pipe (`| head`) has closed it
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (OSError, UserError) as error:
        rank = os.environ.get("RANK", "0")
        where = "" if rank == "0" else f"(process {rank}) "
        print(
            f"error: {where}{printable(message_of(error))}",
            file=sys.stderr,
            flush=True,
        )
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()
        sys.exit(2)
    sys.exit(status or 0)
