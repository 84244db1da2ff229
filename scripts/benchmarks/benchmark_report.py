"""The tables and figures of scripts/benchmark.py: docs/benchmarks/cpu.md, its CSV files and PNG
files."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from data.files import write_text
from evaluation.reports.results_table import markdown_table
from run_directory.environment import processor
from scripts.benchmarks.benchmark_figures import draw_growth, draw_ratios, exponent
from scripts.benchmarks.workloads import CASES, SCHEME_CASES

GOALS = {
    ("train", "A"): 1.28,
    ("train", "B"): 1.40,
    ("prefill", "A"): 1.4,
    ("prefill", "B"): 1.4,
    ("decode-1", "A"): 2.5,
    ("decode-1", "B"): 1.6,
    ("decode-8", "A"): 2.1,
    ("decode-8", "B"): 1.5,
    ("sliding", "A"): 1.7,
    ("sliding", "B"): 1.7,
}
# training steps of RoPE
MOST_COST = {"t5": 1.35, "kerple": 1.35, "fox": 1.35, "fire": 1.8, "cope": 2.5}
HEAD = """# Speed on CPUs

`python scripts/benchmark.py`, {cores} cores of {processor}, torch {torch}. Shapes: A has 4 layers of
width 256, 8 query and 4 key/value heads, FFN 688, vocabulary 4,096, training steps of 8 x 512 tokens; B 6
layers of width 288, 6 heads, FFN 768, vocabulary 32,000, steps of 8 x 256. float32."""
MODELS = """## Compared with transformers and litgpt

[Numbers](cpu.csv). Ours and the others take turns in fresh processes with one pinned thread, on equal
weights and tokens and with the same settings of the allocator; transformers with its default SDPA
attention. tokens/s are by CPU time of the process. `ratio` compares medians with transformers without
torch.compile, `of the fastest` the fastest samples; above 1 is faster. `goal` is our target for the
ratio. Samples are called disturbed where other processes had the core for more than a tenth of the time:
they also evict its caches, which costs the process CPU time, so ratios hold better than speeds.
`checked`: largest difference of losses or logits from transformers'; of generated tokens, the share that
is equal, where every one of them is the most likely token of a full pass within 0.001. Cases: `train` is
a step with fused AdamW; `prefill` 2,048 tokens through the cache with the logits of the last one;
`decode-N` greedy generation of N rows after 32 tokens; `sliding` windows of 2,048 tokens with stride 512
(the recipe of transformers' documentation); `fixed-targets` the last 64 of 2,048 tokens.

![ratios](cpu.png)

{table}"""
SCHEMES = """## Positional schemes

[Numbers](schemes.csv). Cost over RoPE's, both ours, in turns: CPU time of a training step of one row of
2,048 tokens (`scheme-train`) and of greedy generation of one row (`scheme-decode`). 1 is as fast as RoPE;
differences below about 20% are noise where samples were disturbed.

{table}"""
DATA = """## Data

[Numbers](data.csv). `loading` reads batches of 8 x 512 tokens of packed documents ahead of a consumer that
takes 1M tokens/s; `waited` is the share of its time in the loader, after the first batch. `preparing`
tokenizes text (MB of random words, SentencePiece with a vocabulary of 4,096) into a token store with
deduplication, hashes and a held-out split; `naive` is one loop that tokenizes a document after the other
and writes an array. Wall time with all cores.

{table}"""
STARTUP = """## Start-up

[Numbers](startup.csv), in seconds.

{table}"""
GROWTH = """## Growth

[Numbers](growth.csv). CPU time of a call against one size, other sizes fixed: a training step
(`growth-train`) of shape A against sequence length (1 row), rows (256 tokens) and
parameters (4 layers, width 128 to 768, 4 x 256 tokens), and the evaluation of 64 targets at
the end of one window (`growth-score`) against its length. `exponent`: slope of log time against log size
over the larger half of the sizes.

![growth](growth.png)

{table}"""


@dataclass(frozen=True)
class SpeedRow:
    """Speed of one variant. `ratio` is to `baseline`, measured in turns with it; above 1 is
    faster."""

    shape: str
    case: str
    variant: str
    baseline: str
    threads: int
    tokens_per_second: float  # from the median time
    fastest: float
    slowest: float
    ratio: float
    ratio_of_fastest: float
    samples: int
    disturbed: int
    peak_mib: float
    equal: str  # the largest difference, or the share of equal tokens
    date: str


@dataclass(frozen=True)
class GrowthRow:
    """CPU time of one call at one size."""

    case: str
    axis: str  # "length", "rows" or "parameters"
    size: int
    variant: str
    seconds: float
    peak_mib: float
    date: str


@dataclass(frozen=True)
class DataRow:
    """Speed of reading or preparing data, by wall time."""

    case: str
    variant: str
    megabytes: float
    seconds: float
    tokens_per_second: float
    waited: float  # share of the time; of `loading` only
    peak_mib: float
    date: str


@dataclass(frozen=True)
class StartupRow:
    """Seconds of a command."""

    command: str
    cpu_seconds: float
    wall_seconds: float
    date: str


# file, and the columns that identify a row
TABLES: dict[type, tuple[str, list[str]]] = {
    SpeedRow: ("cpu.csv", ["shape", "case", "variant", "threads"]),
    GrowthRow: ("growth.csv", ["case", "axis", "size", "variant"]),
    DataRow: ("data.csv", ["case", "variant", "megabytes"]),
    StartupRow: ("startup.csv", ["command"]),
}


def today() -> str:
    return time.strftime("%Y-%m-%d")


def add(rows: Sequence[Any], folder: Path) -> None:
    """Add rows of one kind to its CSV file, in place of earlier ones with the same key; write
    cpu.md."""
    if not rows:
        return
    folder.mkdir(parents=True, exist_ok=True)
    name, key = TABLES[type(rows[0])]
    if name == "cpu.csv" and rows[0].case in SCHEME_CASES:
        name = "schemes.csv"
    known = [read(folder / name)] if (folder / name).exists() else []
    table = pd.concat([*known, pd.DataFrame([asdict(row) for row in rows])])
    table = table.drop_duplicates(key, keep="last")
    order = {case: i for i, case in enumerate([*CASES, *SCHEME_CASES])}
    table = table.sort_values(
        key[:2] if len(key) > 1 else key, key=lambda x: x.map(lambda v: order.get(v, v))
    )
    write_text(folder / name, table.to_csv(index=False, float_format="%.4g"))
    write_page(folder)


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, keep_default_na=False)


def write_page(folder: Path) -> None:
    """Write cpu.md and its figures from the CSV files that exist."""
    head = {"cores": os.cpu_count(), "processor": processor(), "torch": torch.__version__}
    parts = [HEAD.format(**head)]
    sections = {
        "cpu.csv": (MODELS, models_table),
        "schemes.csv": (SCHEMES, schemes_table),
        "data.csv": (DATA, data_table),
        "startup.csv": (STARTUP, startup_table),
        "growth.csv": (GROWTH, growth_table),
    }
    for name, (text, table_of) in sections.items():
        if (folder / name).exists():
            parts.append(text.format(table=table_of(read(folder / name))))
    if (folder / "cpu.csv").exists():
        draw_ratios(read(folder / "cpu.csv"), GOALS, folder)
    if (folder / "growth.csv").exists():
        draw_growth(read(folder / "growth.csv"), folder)
    write_text(folder / "cpu.md", "\n\n".join(parts) + "\n")


def models_table(table: pd.DataFrame) -> str:
    columns = [
        "case",
        "shape",
        "variant",
        "tokens/s",
        "slowest to fastest",
        "ratio",
        "of the fastest",
        "goal",
    ]
    columns += ["peak, MiB", "samples", "checked", "date"]
    lines = []
    for row in table.to_dict("records"):
        goal = (
            GOALS.get((row["case"], row["shape"]))
            if str(row["variant"]).startswith("ours")
            else None
        )
        lines.append(
            [
                str(row["case"]),
                str(row["shape"]),
                str(row["variant"]),
                f"{row['tokens_per_second']:,.0f}",
                f"{row['slowest']:,.0f} to {row['fastest']:,.0f}",
                f"{row['ratio']:.2f}",
                f"{row['ratio_of_fastest']:.2f}",
                "" if goal is None else f"{goal:g}",
                f"{row['peak_mib']:,.0f}",
                f"{row['samples']}" + (", disturbed" if row["disturbed"] else ""),
                str(row["equal"]),
                str(row["date"]),
            ]
        )
    return markdown_table(columns, lines)


def schemes_table(table: pd.DataFrame) -> str:
    ours = table[table["variant"] != table["baseline"]]
    lines = []
    for (scheme, shape), cells in ours.groupby(["variant", "shape"], sort=True):
        by_case = {row["case"]: row for row in cells.to_dict("records")}
        cost = {case: f"{1 / row['ratio']:.2f}" for case, row in by_case.items()}
        disturbed = any(row["disturbed"] for row in by_case.values())
        goal = MOST_COST.get(str(scheme))
        lines.append(
            [
                str(scheme),
                str(shape),
                cost.get("scheme-train", ""),
                "" if goal is None else f"{goal:g}",
                cost.get("scheme-decode", ""),
                "disturbed" if disturbed else "",
                max(str(row["date"]) for row in by_case.values()),
            ]
        )
    return markdown_table(
        ["scheme", "shape", "training step", "goal", "decoding", "samples", "date"], lines
    )


def data_table(table: pd.DataFrame) -> str:
    lines = [
        [
            str(row["case"]),
            str(row["variant"]),
            f"{row['megabytes']:,.0f}",
            f"{row['seconds']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['waited']:.2%}" if row["case"] == "loading" else "",
            f"{row['peak_mib']:,.0f}",
            str(row["date"]),
        ]
        for row in table.to_dict("records")
    ]
    return markdown_table(
        ["case", "variant", "MB", "seconds", "tokens/s", "waited", "peak, MiB", "date"], lines
    )


def startup_table(table: pd.DataFrame) -> str:
    lines = [
        [
            f"`{row['command']}`",
            f"{row['cpu_seconds']:.2f}",
            f"{row['wall_seconds']:.2f}",
            str(row["date"]),
        ]
        for row in table.to_dict("records")
    ]
    return markdown_table(["command", "CPU", "wall", "date"], lines)


def growth_table(table: pd.DataFrame) -> str:
    lines = []
    for (case, axis, variant), rows in table.groupby(["case", "axis", "variant"], sort=True):
        rows = rows.sort_values("size")
        sizes = rows["size"].to_numpy()
        seconds = rows["seconds"].to_numpy()
        lines.append(
            [
                str(case),
                str(axis),
                str(variant),
                f"{sizes[0]:,} to {sizes[-1]:,}",
                f"{seconds[0]:.3g} to {seconds[-1]:.3g}",
                f"{exponent(sizes, seconds):.2f}",
                f"{rows['peak_mib'].max():,.0f}",
            ]
        )
    return markdown_table(
        ["case", "against", "variant", "sizes", "seconds", "exponent", "largest peak, MiB"], lines
    )
