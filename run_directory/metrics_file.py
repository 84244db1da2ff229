"""metrics.jsonl: the metrics of a run.

Each line is one JSON object with `kind`, `step` and `attempt`. An attempt begins with a line of
kind `start` whose step is the one it resumes from: readers drop lines of earlier attempts after
that step.
"""

import json
from pathlib import Path

from errors import TrainingError


def read_metrics(file: Path, kind: str | None = None) -> list[dict]:
    """The lines of a kind (None: all) that no later attempt superseded, sorted by step; only the
    last line of each (step, kind).

    Ignores an incomplete last line. Raises TrainingError for an invalid line elsewhere.
    """
    held: dict[tuple[int, str], dict] = {}
    with open(file, "rb") as stream:
        for number, raw in enumerate(stream, 1):
            line = parsed_line(raw)
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
    """The last line of each kind; {} if the file does not exist."""
    return {line["kind"]: line for line in read_metrics(file)} if file.exists() else {}


def parsed_line(raw: bytes) -> dict | None:
    """A line of metrics; None for anything else."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    kinds = [type(line.get(key)) for key in ("kind", "step", "attempt")]
    return line if kinds == [str, int, int] else None
