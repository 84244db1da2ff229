"""Insert wrong code, one mutant at a time, and check that the tests mapped to it fail.

    python tests/mutation/check.py                 all of mutants.yaml; about ten minutes on 2 cores
    python tests/mutation/check.py yarn window     those whose name contains one of the words
    python tests/mutation/check.py --jobs 2 --out docs/results/mutations.md

A mutant replaces one text in one file of the product, in a copy of the tree. It is caught when its tests run
and one fails. The table is at fault where a text is not found exactly once, or the tests fail or cannot run
without the mutant.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from data.files import write_text
from errors import TrainingError
from settings.script import Parser, run_main
from training.logging.console import Console

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.yaml")
COPIED = (
    "model",
    "data",
    "training",
    "evaluation",
    "studies",
    "interop",
    "generation",
    "tests",
    "configs",
    "scripts",
)
FILES = (
    "pyproject.toml",
    "errors.py",
    "train.py",
    "generate.py",
    "evaluate.py",
    "study.py",
    "sextant.py",
)


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str  # arguments of pytest


@dataclass(frozen=True)
class MutantOutcome:
    mutant: Mutant
    verdict: str  # caught, survived, or what is wrong with the table
    by: str  # first failing test
    seconds: float


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at once")
    parser.add_argument("--out", help="write the table there, as Markdown")
    options = parser.parse_args()
    console = Console()
    mutants = read(TABLE)
    chosen = [
        m
        for m in mutants
        if not options.words or any(w.lower() in m.name.lower() for w in options.words)
    ]
    if not chosen:
        raise TrainingError(
            f"no mutant's name contains {' or '.join(options.words)}; see {TABLE.name}"
        )
    for name in misplaced(chosen):
        raise TrainingError(
            f"{TABLE.name}: the text of '{name}' is not found exactly once in its file"
        )
    start = time.monotonic()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        healthy = sorted({m.tests for m in chosen})
        with (
            console.bar("tests without mutants", len(healthy), "sets") as bar,
            pool(options.jobs) as workers,
        ):
            results = workers.map(lambda tests: run(Path(folder), None, tests), healthy)
            for tests, (status, first) in zip(healthy, results, strict=True):
                if status != 0:
                    raise TrainingError(
                        f"without a mutant, `pytest {tests}` ends with {status}: {first}"
                    )
                bar.advance(1)
        with console.bar("mutants", len(chosen), "mutants") as bar, pool(options.jobs) as workers:
            for outcome in workers.map(lambda m: test(Path(folder), m), chosen):
                outcomes.append(outcome)
                if outcome.verdict != "caught":
                    console.info(f"{outcome.mutant.name}: {outcome.verdict}")
                bar.advance(1)
    text = report(outcomes, time.monotonic() - start)
    print(text)
    if options.out:
        write_text(Path(options.out), text)
    return 0 if all(o.verdict == "caught" for o in outcomes) else 1


def pool(jobs: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(jobs)


def read(file: Path) -> list[Mutant]:
    entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [Mutant(**entry) for entry in entries]


def misplaced(mutants: list[Mutant]) -> list[str]:
    return [
        m.name for m in mutants if (ROOT / m.file).read_text(encoding="utf-8").count(m.old) != 1
    ]


def test(folder: Path, mutant: Mutant) -> MutantOutcome:
    start = time.monotonic()
    status, first = run(folder, mutant, mutant.tests)
    verdict = {0: "survived", 1: "caught"}.get(status, f"the tests did not run (status {status})")
    return MutantOutcome(mutant, verdict, first, time.monotonic() - start)


def run(folder: Path, mutant: Mutant | None, tests: str) -> tuple[int, str]:
    """(pytest's exit status, its first failure) in a fresh copy of the tree."""
    copy = Path(tempfile.mkdtemp(dir=folder))
    for name in COPIED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    if mutant is not None:
        file = copy / mutant.file
        file.write_text(
            file.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8"
        )
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        *shlex.split(tests),
    ]
    done = subprocess.run(line, cwd=copy, capture_output=True, text=True, timeout=900, check=False)
    shutil.rmtree(copy)
    return done.returncode, first_failure(done.stdout + done.stderr)


def first_failure(output: str) -> str:
    """The first failed test in pytest's output; its last line where none is named."""
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
    return (failed or output.strip().splitlines()[-1:] or [""])[0]


def report(outcomes: list[MutantOutcome], seconds: float) -> str:
    caught = sum(o.verdict == "caught" for o in outcomes)
    lines = [
        "# Mutation check",
        "",
        f"`python tests/mutation/check.py`: {caught} of {len(outcomes)} caught in {seconds / 60:.1f} "
        "minutes. Each entry of tests/mutation/mutants.yaml replaces one text in a copy of the code; then "
        "its tests run.",
        "",
        "| mutant | file | verdict | first test that failed |",
        "|---|---|---|---|",
    ]
    for o in outcomes:
        by = o.by.replace("|", "\\|")
        lines.append(f"| {o.mutant.name} | `{o.mutant.file}` | {o.verdict} | `{by}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_main(main)
