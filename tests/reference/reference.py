"""Store what one commit computes, and compare another tree with it.

    python tests/reference/reference.py store OUT                    of this tree
    python tests/reference/reference.py compare OUT --tree TREE      exit status 1: differences
    python tests/reference/reference.py compare OUT --only models evaluations

Values are stored in five groups: `models` (the conformance cases in float64), `runs` (training
runs), `evaluations` and `generations` (of the stored runs, so they do not depend on `runs`), and
`study`. The last four run the scripts as cases.yaml lists them, on files of Python's standard
library. OUT/start holds the prepared text and the runs. Values of models may differ by 1e-12;
everything else must be equal. About 8 minutes on 1 core.
"""

import argparse
import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import yaml

HERE = Path(__file__).resolve().parent
GROUPS = ("models", "runs", "evaluations", "generations", "study")
TOLERANCE = 1e-12  # of values of models, relative to the largest if that is above 1
TEXTS = 40
TEXT_BYTES = 24_000
TEXT_TIME = 1_700_000_000  # the date of the files is part of the name of the prepared folder
# Keys and columns of files that depend on the time, the machine or the path.
LEFT_OUT = {
    "command",
    "commit",
    "finished",
    "machine",
    "mfu",
    "peak_memory_bytes",
    "resources",
    "seconds",
    "started",
    "timing",
    "tokens_per_second",
    "uncommitted_changes",
    "versions",
}
Values = dict[str, np.ndarray]


class Tree:
    """A checkout whose scripts run in the folder `work`."""

    def __init__(self, root: Path, work: Path, jobs: int):
        self.root = root.resolve()
        self.work = work.resolve()
        self.jobs = jobs
        (self.work / "configs").symlink_to(self.root / "configs")
        self.cases = yaml.safe_load((HERE / "cases.yaml").read_text(encoding="utf-8"))
        self.environment = os.environ | {
            "PYTHONPATH": str(self.root),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def run(self, script: str | Path, arguments: list[str]) -> str:
        """Standard output of a script. Prints its errors and exits if it fails."""
        command = [sys.executable, str(self.root / script), *arguments]
        done = subprocess.run(
            command,
            cwd=self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
        if done.returncode != 0:
            print(f"{shlex.join(command)}\n{done.stderr[-3000:]}", flush=True)
            raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-200:]}")
        return done.stdout

    def models(self) -> Values:
        out = self.work / "models.npz"
        self.run(HERE / "model_values.py", [str(out)])
        with np.load(out) as stored:
            return dict(stored)

    def runs(self) -> Values:
        write_texts(self.work / "text")

        def train(name: str, arguments: list[str]) -> Values:
            self.run("train.py", ["--run-dir", f"runs/{name}", *self.cases["base"], *arguments])
            return run_values(self.work / "runs" / name, name)

        # One at a time: the first prepares the text.
        return self._each("runs", train, jobs=1)

    def evaluations(self) -> Values:
        def evaluate(name: str, arguments: list[str]) -> Values:
            folder = self.work / arguments[0] / "evaluation" / name
            self.run("evaluate.py", [*arguments, f"folder={name}"])
            return results_values(folder, name)

        return self._each("evaluations", evaluate) | cells(self.work)

    def generations(self) -> Values:
        def generate(name: str, arguments: list[str]) -> Values:
            text = self.run("generate.py", arguments)
            if "--jsonl" in arguments:
                records = [json.loads(line) for line in text.splitlines()]
                return json_values(records, name)
            return {name: np.array(text)}

        return self._each("generations", generate)

    def _each(self, group: str, measure, jobs: int | None = None) -> Values:
        """The values of all cases of a group; several processes at a time."""
        values = {}
        with ThreadPoolExecutor(jobs or self.jobs) as pool:
            cases = self.cases[group].items()
            for measured in pool.map(lambda case: attempt(measure, *case), cases):
                values |= measured
        return values

    def study(self) -> Values:
        write_texts(self.work / "text")
        study = self.cases["study"]
        study["base"] = [*self.cases["base"], *study["base"]]
        (self.work / "study.yaml").write_text(yaml.safe_dump(study), encoding="utf-8")
        self.run("study.py", ["study.yaml", "--jobs", str(self.jobs)])
        folder = self.work / "runs" / "studies" / "study"
        return results_values(folder, "study") | cells(folder)


def attempt(measure, name: str, arguments: list[str]) -> Values:
    """The values of a case; its error is a value too."""
    try:
        return measure(name, arguments)
    except RuntimeError as error:
        return {f"{name}/error": np.array(str(error))}


def write_texts(folder: Path) -> None:
    """The first bytes of large files of the standard library, with a fixed date."""
    folder.mkdir(exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(library.glob("[a-z]*.py")) if path.stat().st_size > TEXT_BYTES]
    for path in files[:TEXTS]:
        copy = folder / f"{path.stem}.txt"
        copy.write_bytes(path.read_bytes()[:TEXT_BYTES])
        os.utime(copy, (TEXT_TIME, TEXT_TIME))


def run_values(folder: Path, name: str) -> Values:
    """Losses of all steps, validation, samples, and the last weights and averages."""
    from safetensors.numpy import load_file

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = json_values([json.loads(line) for line in lines], f"{name}/metrics")
    settings = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
    values |= json_values(settings, f"{name}/settings")
    last = max((folder / "checkpoints").iterdir())
    for path in sorted(last.glob("*.safetensors")):
        for key, value in load_file(path).items():
            values[f"{name}/{path.stem}/{key}"] = value
    return values


def results_values(folder: Path, name: str) -> Values:
    """Columns of results.csv, and leaves of results.json."""
    values = {}
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        columns = defaultdict(list)
        for row in csv.DictReader(file):
            for column, cell in row.items():
                columns[column].append(cell)
    for column, cells in columns.items():
        if column not in LEFT_OUT:
            values[f"{name}/results.csv/{column}"] = np.array(cells)
    stored = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return values | json_values(stored, f"{name}/results.json")


def json_values(value, name: str) -> Values:
    """The leaves of a JSON value by their path; a list of numbers or strings is one leaf."""
    if isinstance(value, list) and any(isinstance(part, list | dict) for part in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {name: np.array(json.dumps(value))}
    values: Values = {}
    for key, part in value.items():
        if key not in LEFT_OUT:
            values |= json_values(part, f"{name}/{key}")
    return values


def cells(folder: Path) -> Values:
    """The arrays of the stored cells of all runs of a folder."""
    values: Values = {}
    for path in sorted(folder.glob("runs/*/evaluation/**/cells/**/*.npz")):
        name = f"cells/{path.relative_to(folder / 'runs')}"
        with np.load(path, allow_pickle=False) as stored:
            values |= {f"{name}/{key}": x for key, x in stored.items() if x.dtype != object}
    return values


def differences(group: str, expected: Values, computed: Values) -> list[str]:
    """One line for each value that differs, and for those that only one side has."""
    lines = [f"{name}: missing" for name in expected.keys() - computed.keys()]
    lines += [f"{name}: new" for name in computed.keys() - expected.keys()]
    for name in expected.keys() & computed.keys():
        line = difference(expected[name], computed[name], TOLERANCE if group == "models" else 0)
        if line:
            lines.append(f"{name}: {line}")
    return sorted(lines)


def difference(expected: np.ndarray, computed: np.ndarray, tolerance: float) -> str:
    """How two values differ; empty if they do not."""
    if expected.shape != computed.shape:
        return f"shape {expected.shape} is now {computed.shape}"
    expected = np.atleast_1d(expected)
    computed = np.atleast_1d(computed)
    if expected.dtype.kind in "US" or computed.dtype.kind in "US":
        unequal = expected != computed
        if not unequal.any():
            return ""
        before, after = (repr(str(x[unequal][0]))[:80] for x in (expected, computed))
        return f"{unequal.sum()} of {unequal.size}: {before} is now {after}"
    expected = expected.astype(np.float64)
    computed = computed.astype(np.float64)
    scale = max(1.0, float(np.nanmax(np.abs(expected), initial=0)))
    atol = tolerance * scale
    unequal = ~np.isclose(computed, expected, rtol=0, atol=atol, equal_nan=True)
    if not unequal.any():
        return ""
    apart = np.abs(computed - expected)[unequal].max()
    return f"{unequal.sum()} of {unequal.size}, by up to {apart:.2e}"


def store(out: Path, root: Path, groups: list[str], jobs: int) -> int:
    start = out / "start"
    if "runs" in groups and start.exists():
        shutil.rmtree(start)
    start.mkdir(parents=True, exist_ok=True)
    for group in groups:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="reference-") as folder:
            work = start if group == "runs" else copied(start, Path(folder), group)
            values = getattr(Tree(root, work, jobs), group)()
        np.savez_compressed(out / f"{group}.npz", **escaped(values))
        print(f"{group}: {len(values)} values, {time.monotonic() - begin:.0f} s", flush=True)
    return 0


def compare(out: Path, root: Path, groups: list[str], jobs: int) -> int:
    differ = False
    for group in groups:
        begin = time.monotonic()
        with np.load(out / f"{group}.npz") as stored:
            expected = dict(stored)
        with tempfile.TemporaryDirectory(prefix="reference-") as folder:
            work = copied(out / "start", Path(folder), group)
            computed = escaped(getattr(Tree(root, work, jobs), group)())
        lines = differences(group, expected, computed)
        differ = differ or bool(lines)
        seconds = time.monotonic() - begin
        print(f"{group}: {len(lines)} of {len(expected)} differ, {seconds:.0f} s")
        for line in lines:
            print(f"  {line}", flush=True)
    return int(differ)


def copied(start: Path, work: Path, group: str) -> Path:
    """The folder to work in, with the stored runs where `group` reads them."""
    if group in ("evaluations", "generations"):
        shutil.copytree(start, work, ignore=shutil.ignore_patterns("configs"), dirs_exist_ok=True)
    return work


def escaped(values: Values) -> Values:
    """Names that can be names of files in an archive."""
    return {name.replace(":", "="): value for name, value in values.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["store", "compare"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="default: this one")
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=GROUPS)
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time")
    options = parser.parse_args()
    action = store if options.action == "store" else compare
    return action(options.out, options.tree, options.only, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
