"""metrics.jsonl: the metrics of a run.

Each line is one JSON object with `kind`, `step` and `attempt`. An attempt begins with a line of
kind `start` whose step is the one it resumes from: readers drop lines of earlier attempts after
that step.
"""

import json
import math
import os
from pathlib import Path

from errors import TrainingError


class MetricsFile:
    """Appends lines to metrics.jsonl and flushes each to the operating system, so kill -9 loses
    none.

    Opening it starts a new attempt at `step`; an incomplete last line is removed first.
    """

    def __init__(self, file: Path, step: int):
        self.attempt = 1
        if file.exists():
            _complete_last_line(file)
            self.attempt += max((line["attempt"] for line in read_metrics(file)), default=0)
        self._stream = file.open("a", encoding="utf-8")
        self.write(step, "start")

    def write(self, step: int, kind: str = "train", **values: object) -> dict:
        """Write one line and return it as written; a number that is not finite becomes "nan" or
        "inf"."""
        line: dict = {"kind": kind, "step": step, "attempt": self.attempt}
        line |= {key: _plain(value) for key, value in values.items()}
        self._stream.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._stream.flush()
        return line

    def sync(self) -> None:
        """Flush all lines to the disk; called before a checkpoint."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()


def read_metrics(file: Path, kind: str | None = None) -> list[dict]:
    """The lines of a kind (None: all) that no later attempt superseded; the last of each (step,
    kind), sorted by step.

    Ignores an incomplete last line. Raises TrainingError for an invalid line elsewhere.
    """
    held: dict[tuple[int, str], dict] = {}
    with open(file, "rb") as stream:
        for number, raw in enumerate(stream, 1):
            line = _parsed(raw)
            if line is None and raw.endswith(b"\n"):
                raise TrainingError(f"{file}:{number}: not a line of metrics; remove it")
            if line is None:
                continue
            if line["kind"] == "start":
                held = {key: old for key, old in held.items() if old["step"] <= line["step"]}
            key = (line["step"], line["kind"])
            held.pop(key, None)  # the last one defines the order within its step
            held[key] = line
    lines = [line for line in held.values() if kind in (None, line["kind"])]
    return sorted(lines, key=lambda line: line["step"])  # stable


def last_lines(file: Path) -> dict[str, dict]:
    """The last line of each kind; {} where the file does not exist."""
    return {line["kind"]: line for line in read_metrics(file)} if file.exists() else {}


def _parsed(raw: bytes) -> dict | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    kinds = [type(line.get(key)) for key in ("kind", "step", "attempt")]
    return line if kinds == [str, int, int] else None


def _complete_last_line(file: Path) -> None:
    """Remove an incomplete last line; a line that lacks only its newline gets one."""
    content = file.read_bytes()
    rest = content.rpartition(b"\n")[2]
    if rest and _parsed(rest) is not None:
        with file.open("ab") as stream:
            stream.write(b"\n")
    else:
        os.truncate(file, len(content) - len(rest))


def _plain(value: object) -> object:
    """A value that JSON can represent; json.dumps raises TypeError for other classes."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
