"""Time and peak memory of one long window of text on a small machine.

    python scripts/checks/long_context.py --length 131072   one scheme of each class, random weights
    python scripts/checks/long_context.py rope alibi fire --length 131072   these schemes
    python scripts/checks/long_context.py runs/quickstart --length 131072   a trained run
    python scripts/checks/long_context.py rope fire --length 8192,32768 --threads 1
    python scripts/checks/long_context.py rope --length 262144 --processes 2   shared by two processes

Schemes are measured in the model of configs/tiny.yaml with random weights and tokens, on which time
and memory do not depend; a run with the end of its longest validation document. Each measurement
runs in new processes: 64 targets at the end of one window, in chunks of 4096 tokens. Rows are added
to docs/results/long_context.csv, from which the table in .md is written; a row with the same
subject, length, threads and processes is replaced.
"""

import os
import platform
import socket
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from data.files import write_text
from errors import TrainingError
from evaluation.ranks import joined
from evaluation.reports.results_table import markdown_table
from evaluation.scoring.forecast import memory_needed
from evaluation.scoring.scoring import ModelScorer
from evaluation.scoring.text import EvaluationText
from model import SCHEMES, Transformer
from model.devices import prepare_cpu
from run_directory.console import Console, duration
from run_directory.run import Run, is_run
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from settings.script import Parser, run_main
from training.hardware import peak_memory

ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = ["rope", "none", "sinusoidal", "alibi", "kerple", "t5", "fire", "fox"]
VOCABULARY = 4096
TARGETS = 64
CHUNK = 4096
WARM = 512
KEYS = ["subject", "length", "threads", "processes"]
HEAD = """# Cost of one long window on a small machine

`python scripts/checks/long_context.py` scores 64 targets at the end of one window, in chunks of 4096 tokens
through the key/value cache, in float32, with the model of configs/tiny.yaml (3.1M parameters). A subject
is a scheme, with random weights and tokens, or a run. Several
processes share the window instead ([Context parallelism](../context_sharding.md)). Other work on the machine
affects wall time more than CPU time, which is summed over threads and processes. *Peak* is the resident
memory of a process, *increase* that over Python, libraries and weights, *estimate* what evaluate.py
predicts for the window. Machine: {machine}.

"""


@dataclass(frozen=True)
class WindowRow:
    """One measurement."""

    subject: str
    length: int
    threads: int  # of each process
    processes: int  # that share the window
    seconds: float  # wall time
    cpu_seconds: float  # over threads and processes
    peak_gib: float  # resident memory of the process that needs the most
    before_gib: float  # before the window: Python, libraries, weights, one short pass
    forecast_gib: float  # the estimate of evaluate.py for the window
    nll: float  # mean of the targets; about ln V for random tokens and weights


def main() -> int:
    assert __doc__
    parser = Parser(__doc__)
    parser.add_argument(
        "subjects", nargs="*", default=SUBJECTS, help="run directories or names of schemes"
    )
    parser.add_argument(
        "--length",
        default="131072",
        help="input tokens; several with commas",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count(),
        help="of each measurement",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="that share each window",
    )
    parser.add_argument(
        "--results", default=str(ROOT / "docs" / "results"), help="folder of the two files"
    )
    options = parser.parse_args()
    lengths = [int(length) for length in options.length.split(",")]
    console = Console()
    folder = Path(options.results)
    rows = []
    for subject in options.subjects:
        model_of(subject, max(lengths))  # reports errors before anything is measured
    for length in sorted(lengths):
        for subject in options.subjects:
            console.info(f"{subject} at {length:,} tokens ...")
            row = measure(subject, length, options.threads, options.processes)
            console.info(
                f"{subject} at {length:,} tokens: {duration(row.seconds)} wall time, "
                f"{row.cpu_seconds:.0f} CPU seconds, peak {row.peak_gib:.2f} GiB"
            )
            rows = keep(row, folder)
    console.table(
        "",
        list(COLUMNS),
        cells([row for row in rows if row.length in lengths]),
    )
    return 0


def model_of(subject: str, length: int) -> Transformer:
    """The model of a run, or of configs/tiny.yaml with a scheme of this name and random weights.

    Raises TrainingError or ModelError if there is no such subject or its positions end before
    `length`.
    """
    if is_run(Path(subject)):
        model = Run.open(subject).load().model
    elif subject in SCHEMES:
        overrides = [f"model.position.name={subject}"]
        if subject == "learned":
            overrides.append(f"model.position.max_length={length}")
        settings = load_settings(RunSettings, [str(ROOT / "configs" / "tiny.yaml"), *overrides])
        model = Transformer(settings.model, VOCABULARY, settings.train_length).initialize(0).eval()
    else:
        known = ", ".join(SCHEMES)
        raise TrainingError(
            f"{subject} is neither a run directory nor a scheme; known schemes are {known}"
        )
    if model.limit is not None and length > model.limit:
        raise TrainingError(
            f"{subject}: its positions end after {model.limit} tokens; lower --length"
        )
    return model


def tokens_of(subject: str, length: int, vocab_size: int) -> np.ndarray:
    """(1, length + 1) tokens: of the run's longest validation document, or random.

    Raises TrainingError if a run has no document of this length.
    """
    if not is_run(Path(subject)):
        return np.random.default_rng(0).integers(3, vocab_size, (1, length + 1))
    text = EvaluationText(Run(Path(subject)).open_data().valid)
    longest = int(text.lengths.argmax())
    if text.lengths[longest] <= length:
        raise TrainingError(
            f"{subject}: its longest validation document has {text.lengths[longest]} tokens; "
            "lower --length"
        )
    return text.windows(np.array([longest]), text.lengths[[longest]], length)


def measure(
    subject: str,
    length: int,
    threads: int,
    processes: int,
) -> WindowRow:
    """Time and memory of one window, in new processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        started = [
            pool.submit(measure_rank, subject, length, threads, processes, rank, port)
            for rank in range(processes)
        ]
        rows = [future.result() for future in started]
    return replace(
        max(rows, key=lambda row: row.peak_gib - row.before_gib),
        seconds=max(row.seconds for row in rows),
        cpu_seconds=sum(row.cpu_seconds for row in rows),
    )


def measure_rank(
    subject: str, length: int, threads: int, processes: int, rank: int, port: int
) -> WindowRow:
    """Time and peak memory of this process for its part of one window."""
    group = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
    }
    os.environ.update({name: str(number) for name, number in group.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    prepare_cpu(threads)
    model = model_of(subject, length)
    tokens = tokens_of(subject, length, model.vocab_size)
    device = torch.device("cpu")
    with joined(processes) as ranks:
        scorer = ModelScorer(model, chunk=CHUNK, shard=ranks.shard)
        scorer(tokens[:, : WARM + 1], min(TARGETS, length))  # loads libraries and builds tables
        ranks.collect(None)  # start together
        before = peak_memory(device)
        clock = time.perf_counter()
        used = time.process_time()
        nll = scorer(tokens, TARGETS)
        return WindowRow(
            subject=Path(subject).name,
            length=length,
            threads=threads,
            processes=processes,
            seconds=time.perf_counter() - clock,
            cpu_seconds=time.process_time() - used,
            peak_gib=peak_memory(device) / 2**30,
            before_gib=before / 2**30,
            forecast_gib=memory_needed(model, length, TARGETS, 1, CHUNK, processes) / 2**30,
            nll=float(nll.mean()),
        )


def keep(row: WindowRow, folder: Path) -> list[WindowRow]:
    """Add the row to both files, in place of an earlier one of its kind; returns all rows."""
    path = folder / "long_context.csv"
    measured = pd.DataFrame([asdict(row)])
    known = [pd.read_csv(path, keep_default_na=False)] if path.exists() else []
    table = pd.concat([*known, measured]).drop_duplicates(KEYS, keep="last")
    table = table.sort_values(KEYS[::-1], ascending=[True, True, False, True])
    write_text(path, table.to_csv(index=False, float_format="%.4g"))
    rows = [WindowRow(**record) for record in table.to_dict("records")]
    text = HEAD.format(machine=machine()) + markdown_table(list(COLUMNS), cells(rows))
    write_text(folder / "long_context.md", text + "\n")
    return rows


COLUMNS: dict[str, Callable[[WindowRow], str]] = {
    "subject": lambda row: row.subject,
    "length": lambda row: f"{row.length:,}",
    "processes": lambda row: str(row.processes),
    "threads": lambda row: str(row.threads),
    "CPU seconds": lambda row: f"{row.cpu_seconds:.0f}",
    "wall time": lambda row: duration(row.seconds),
    "peak, GiB": lambda row: f"{row.peak_gib:.2f}",
    "increase, GiB": lambda row: f"{row.peak_gib - row.before_gib:.2f}",
    "estimate, GiB": lambda row: f"{row.forecast_gib:.2f}",
}


def cells(rows: list[WindowRow]) -> list[list[str]]:
    return [[format_cell(row) for format_cell in COLUMNS.values()] for row in rows]


def machine() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {total:.0f} GiB, torch {torch.__version__}"
    )


if __name__ == "__main__":
    run_main(main)
