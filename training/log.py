"""metrics.jsonl, the truth about a run.

Each line is one JSON object with `kind`, `step` and `attempt`.  An attempt begins with a line of kind
`start` whose step is the one it resumes from: what earlier attempts wrote past that step is superseded, and
readers drop it.
"""

import json
import math
import os
from pathlib import Path

from training.errors import TrainingError


class MetricsLog:
    """Appends lines to metrics.jsonl, each handed to the operating system at once, so kill -9 loses none.

    Opening it begins a new attempt at `step`, numbered after those in the file; a torn last line is cut off
    first.
    """

    def __init__(self, file: Path, step: int):
        self.file = Path(file)
        lines = _lines(self.file) if self.file.exists() else []
        _cut_torn_line(self.file)
        self.attempt = 1 + max((line["attempt"] for line in lines), default=0)
        self._stream = self.file.open("a", encoding="utf-8")
        self.write(step, "start")

    def write(self, step: int, kind: str = "train", **values: object) -> dict:
        """Write one line and return it as written; a number that is not finite becomes "nan" or "inf"."""
        line = {"kind": kind, "step": step, "attempt": self.attempt} | {
            k: _plain(v) for k, v in values.items()
        }
        try:
            self._stream.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            self._stream.flush()
        except OSError as error:
            raise TrainingError(f"{self.file}: step {step} cannot be written: {error.strerror}") from error
        return line

    def sync(self) -> None:
        """Wait until all lines are on the disk: called before a checkpoint that counts on them."""
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise TrainingError(f"{self.file}: cannot be forced to the disk: {error.strerror}") from error

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(file: Path, kind: str | None = None) -> list[dict]:
    """The lines that hold, by step: of each (step, kind) the last, without what a later attempt superseded.

    A torn last line is left out.  `kind` keeps only lines of that kind.  Raises TrainingError for a broken
    line elsewhere.
    """
    kept: dict[tuple[int, str], dict] = {}
    for line in _lines(Path(file)):
        if line["kind"] == "start":
            kept = {place: old for place, old in kept.items() if place[0] <= line["step"]}
        place = line["step"], line["kind"]
        kept.pop(place, None)
        kept[place] = line
    lines = sorted(kept.values(), key=lambda line: line["step"])  # stable: of one step in the order written
    return [line for line in lines if kind is None or line["kind"] == kind]


def _lines(file: Path) -> list[dict]:
    """All whole lines of the file, in order."""
    *whole, tail = file.read_bytes().split(b"\n")
    found = []
    for number, raw in enumerate(whole, 1):
        line = _parsed(raw)
        if line is None:
            raise TrainingError(f"{file}:{number}: not a line of metrics; remove it")
        found.append(line)
    if (line := _parsed(tail)) is not None:  # whole but for its newline
        found.append(line)
    return found


def _parsed(raw: bytes) -> dict | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"kind", "step", "attempt"} <= line.keys() else None


def _cut_torn_line(file: Path) -> None:
    """End the file after its last whole line; a line whole but for its newline gets one."""
    if not file.exists():
        return
    content = file.read_bytes()
    tail = content.rpartition(b"\n")[2]
    if not tail:
        return
    with open(file, "r+b") as stream:
        if _parsed(tail) is None:
            stream.truncate(len(content) - len(tail))
        else:
            stream.seek(0, os.SEEK_END)
            stream.write(b"\n")


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    item = getattr(value, "item", None)  # of numpy and torch numbers
    if item is not None:
        return _plain(item())
    raise TypeError(f"{type(value).__name__} cannot be written to the metrics")
