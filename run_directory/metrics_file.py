"""metrics.jsonl: the metrics of a run.

Each line is one JSON object with `kind`, `step` and `attempt`. An attempt begins with a line of
kind `start` whose step is the one it resumes from: readers drop lines of earlier attempts after
that step.
"""

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from errors import TrainingError

_BLOCK = 1 << 20  # bytes read at a time from the end of a file


class MetricsFile:
    """Appends lines to metrics.jsonl and flushes each to the operating system, so kill -9 loses
    none.

    Opening it starts a new attempt at `step`; an incomplete last line is removed first.
    """

    def __init__(self, file: Path, step: int):
        self.file = Path(file)
        last = _last_line(self.file) if self.file.exists() else None
        self.attempt = 1 + (last["attempt"] if last else 0)  # attempts of a file are ascending
        self._stream = self.file.open("a", encoding="utf-8")
        self.write(step, "start")

    def write(self, step: int, kind: str = "train", **values: object) -> dict:
        """Write one line and return it as written; a number that is not finite becomes "nan" or
        "inf"."""
        line: dict = {"kind": kind, "step": step, "attempt": self.attempt}
        line |= {key: _plain(value) for key, value in values.items()}
        try:
            self._stream.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            self._stream.flush()
        except OSError as error:
            raise TrainingError(
                f"{self.file}: step {step} cannot be written: {error.strerror}"
            ) from error
        return line

    def sync(self) -> None:
        """Flush all lines to the disk; called before a checkpoint."""
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise TrainingError(
                f"{self.file}: cannot be flushed to disk: {error.strerror}"
            ) from error

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(file: Path, kind: str | None = None) -> list[dict]:
    """`held_lines` of one kind (None: all); the last of each (step, kind), sorted by step."""
    return latest(line for line in held_lines(file) if kind in (None, line["kind"]))


def latest(lines: Iterable[dict]) -> list[dict]:
    """The last line of each (step, kind), sorted by step."""
    kept: dict[tuple[int, str], dict] = {}
    for line in lines:
        # the last one defines the order within its step
        kept.pop((line["step"], line["kind"]), None)
        kept[line["step"], line["kind"]] = line
    return sorted(kept.values(), key=lambda line: line["step"])  # stable


def held_lines(file: Path) -> Iterator[dict]:
    """Iterate over the lines that no later attempt superseded, in the order written.

    Ignores an incomplete last line. Raises TrainingError for an invalid line elsewhere.
    """
    # One pass over the bytes finds the starts: each supersedes the lines before it of later steps.
    starts = []
    end = 0
    with open(file, "rb") as stream:
        for number, raw in enumerate(stream, 1):
            end += len(raw)
            if b'"start"' in raw and (line := _parsed(raw)) and line["kind"] == "start":
                starts.append((number, line["step"]))
    with open(file, "rb") as stream:
        for number, raw in enumerate(stream, 1):
            if (end := end - len(raw)) < 0:
                return  # written since the first pass
            line = _parsed(raw)
            if line is None:
                if not raw.endswith(b"\n"):
                    return
                raise TrainingError(f"{file}:{number}: not a line of metrics; remove it")
            starts = [start for start in starts if start[0] > number]
            if all(line["step"] <= step for _, step in starts):
                yield line


def last_lines(file: Path) -> dict[str, dict]:
    """The last line of each kind, read from the end of a file; {} where it does not exist."""
    if not file.exists():
        return {}
    with open(file, "rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _BLOCK))
        lines = [line for raw in stream if (line := _parsed(raw)) is not None]
    kept: dict[str, dict] = {}
    for line in lines:
        if line["kind"] == "start":
            kept = {kind: old for kind, old in kept.items() if old["step"] <= line["step"]}
        kept[line["kind"]] = line
    return kept


def _parsed(raw: bytes) -> dict | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    kinds = [type(line.get(key)) for key in ("kind", "step", "attempt")]
    return line if kinds == [str, int, int] else None


def _last_line(file: Path) -> dict | None:
    """The last complete line of a file; None where there is none. An incomplete line after it is
    removed; a line that lacks only its newline gets one. Reads only the end of the file."""
    with open(file, "r+b") as stream:
        if not (size := stream.seek(0, os.SEEK_END)):
            return None
        with mmap.mmap(stream.fileno(), 0) as text:
            end = text.rfind(b"\n") + 1
            last = text[text.rfind(b"\n", 0, max(end - 1, 0)) + 1 : end]
            tail = text[end:]
        if tail and (line := _parsed(tail)) is not None:
            stream.seek(size)
            stream.write(b"\n")
            return line
        stream.truncate(end)
    if last and _parsed(last) is None:
        raise TrainingError(f"{file}: its last line is not a line of metrics; remove it")
    return _parsed(last)


def _plain(value: object) -> object:
    """A value that JSON can represent; json.dumps raises TypeError for other classes."""
    if hasattr(value, "item"):  # NumPy and PyTorch scalars
        value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
