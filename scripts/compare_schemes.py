"""Train every positional scheme on the same batches and evaluate each past its training length.

    python scripts/compare_schemes.py                          all of configs/position/, configs/mixer/
    python scripts/compare_schemes.py --jobs 2                 two at a time, one thread each
    python scripts/compare_schemes.py configs/position/rope.yaml configs/position/t5.yaml
    python scripts/compare_schemes.py --overrides training.tokens=2M seed=1

For each scheme: NLL at 1×, 2×, 4× and 8× the training length on the same targets (evaluate.py), the NLL of a
unigram model, NLL with permuted position numbers (the order of tokens and the attention mask are unchanged),
and whether training has changed all parameters of the scheme. Runs are in runs/schemes/, results in
docs/results/schemes.md and .csv. Running it again resumes.
"""

import csv
import io
import json
import os
import platform
import shlex
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from data import open_prepared
from data.files import write_text
from model import SCHEMES, TokenPositions, Transformer
from training.config.load import load_settings
from training.config.settings import RunSettings
from training.config.yaml_io import read_yaml
from training.files import read_json, write_json
from training.logging.console import Console, Parser, run_main
from training.run.directory import MANIFEST, load

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "configs" / "comparison" / "schemes.yaml"
MULTIPLES = (1, 2, 4, 8)
WINDOWS, PROBE_SEED = 64, 0


@dataclass(frozen=True)
class SchemeRow:
    """The results of one scheme. NLL in nats per token; None if the scheme has no such length or position."""

    name: str
    checkpoint: str  # hash of the evaluated checkpoint
    layers: int
    scheme: str
    parameters: int
    learned: int  # parameters of the positional scheme
    seconds: float  # of training
    unigram: float
    nll: dict[str, float | None]  # by multiple of the training length, "1" ... "8"
    plain: float  # NLL of the windows of the permutation probe
    permuted: float | None  # NLL of the same windows with permuted positions
    permuted_low: float | None  # lower end of the 95% interval of permuted − plain
    unmoved: list[str]  # parameters of the scheme that training has not changed


def main() -> int:
    options = parse()
    files = [Path(f) for f in options.files] or everything()
    console, folder = Console(), Path(options.runs)
    missing = set(SCHEMES) - {kind for f in files for kind in schemes_of(f)}
    if missing and not options.files:
        console.info(f"no settings file uses: {', '.join(sorted(missing))}")
    rows, failures = {}, {}
    load_settings(RunSettings, [str(BASE), *options.overrides])  # validates the overrides

    def one(file: Path) -> None:
        try:
            rows[file.stem] = measure(file, folder / file.stem, [*deep_enough(file), *options.overrides])
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or error.stdout or "").strip().splitlines()
            failures[file.stem] = [line for line in lines if line.startswith("error:")] or lines[-1:]
            console.info(f"{file.stem}: {failures[file.stem]}")

    subprocess.run(  # once, before parallel runs need it
        [sys.executable, "scripts/prepare.py", str(BASE), *options.overrides], cwd=ROOT, check=True
    )
    with console.bar("schemes", len(files), "schemes") as bar, ThreadPoolExecutor(options.jobs) as pool:
        for _ in as_completed([pool.submit(one, file) for file in files]):
            bar.advance(1)
    ordered = [rows[f.stem] for f in files if f.stem in rows]
    text = report(ordered, failures, load_settings(RunSettings, [str(BASE), *options.overrides]))
    out = Path(options.out)
    write_text(out.with_suffix(".md"), text)
    write_text(out.with_suffix(".csv"), table_csv(ordered))
    print(text)
    return 1 if failures else 0


def everything() -> list[Path]:
    configs = ROOT / "configs"
    return sorted((configs / "position").glob("*.yaml")) + sorted((configs / "mixer").glob("*.yaml"))


def parse() -> Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "files", nargs="*", metavar="FILE.yaml", help="default: all of configs/position/ and configs/mixer/"
    )
    parser.add_argument("--jobs", type=int, default=1, help="schemes at a time, one thread each")
    parser.add_argument("--runs", default="runs/schemes", help="directory of the runs")
    parser.add_argument("--out", default="docs/results/schemes", help="path of the results, without suffix")
    parser.add_argument(
        "--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="overrides for all runs"
    )
    return parser.parse_args()


def schemes_of(file: Path) -> set[str]:
    """Names of the schemes in a settings file."""
    model = load_settings(RunSettings, [str(BASE), str(file), *deep_enough(file)]).model
    return {choice.name for choice in model.kinds.values()}


def deep_enough(file: Path) -> list[str]:
    """Overrides that give the model at least one layer per entry of a layer pattern."""
    position = (read_yaml(file)[0].get("model") or {}).get("position") or {}
    base = load_settings(RunSettings, [str(BASE)]).model.layers
    needed = len(position.get("layers") or [])
    return [f"model.layers={needed}"] if needed > base else []


def measure(file: Path, run: Path, overrides: list[str]) -> SchemeRow:
    """Train, evaluate and probe one scheme, or read its stored results.

    train.py is always called: it rejects a run directory with other settings and does nothing in a
    finished one.
    """
    found = run / "comparison.json"
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}

    def call(*line: str) -> None:
        subprocess.run(
            [sys.executable, *line], cwd=ROOT, env=one_thread, check=True, capture_output=True, text=True
        )

    call("train.py", str(BASE), str(file), "--run-dir", str(run), "training.num_threads=1", *overrides)
    loaded = load(run)
    if found.is_file() and read_json(found).get("checkpoint") == loaded.checkpoint_hash:
        return SchemeRow(**read_json(found))
    l0 = loaded.settings.train_length
    lengths = [l0 * m for m in MULTIPLES if loaded.model.limit is None or l0 * m <= loaded.model.limit]
    chosen = ["folder=comparison", f"lengths={lengths}", "targets=64", "documents=40", "spans_per_document=1"]
    call("evaluate.py", str(run), *chosen, "methods=[trained]")
    results = read_json(run / "evaluation" / "comparison" / "results.json")
    nll = {str(c["length"] // l0): c["nll"] for c in results["cells"] if c["method"] == "trained"}
    plain, permuted, low = probe(loaded.model, run)
    learned = [(n, p) for n, p in loaded.model.named_parameters() if "position" in n.split(".")]
    fresh = Transformer(
        loaded.settings.model, loaded.model.vocab_size, l0, loaded.settings.original_length
    ).initialise(loaded.settings.seed)
    start = dict(fresh.named_parameters())
    row = SchemeRow(
        name=file.stem,
        checkpoint=loaded.checkpoint_hash,
        layers=loaded.settings.model.layers,
        scheme=", ".join(sorted({choice.name for choice in loaded.settings.model.kinds.values()})),
        parameters=loaded.model.parameter_count(),
        learned=sum(p.numel() for _, p in learned),
        seconds=training_seconds(run),
        unigram=results["unigram_nll"],
        nll={str(m): nll.get(str(m)) for m in MULTIPLES},
        plain=plain,
        permuted=permuted,
        permuted_low=low,
        unmoved=[n for n, p in learned if torch.equal(p, start[n])],
    )
    write_json(found, asdict(row))
    return row


def training_seconds(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    tokens = max((line.get("tokens") or 0) for line in lines)
    return tokens / float(np.median(rates)) if rates else float("nan")


@torch.no_grad()
def probe(model: Transformer, run: Path) -> tuple[float, float | None, float | None]:
    """(NLL of held-out windows, with permuted positions, lower end of the 95% interval of the difference).
    The last two are None if no layer reads position numbers."""
    store = open_prepared(read_json(run / MANIFEST)["data"]).valid
    length, rng = model.train_length, np.random.default_rng(PROBE_SEED)
    long = np.flatnonzero(store.lengths > length)
    windows = []
    for document in rng.choice(long, WINDOWS):
        text = store.document(int(document))
        start = rng.integers(0, len(text) - length)
        windows.append(np.asarray(text[start : start + length + 1], dtype=np.int64))
    tokens = torch.from_numpy(np.stack(windows))
    places = TokenPositions.plain(length)
    reads = any(SCHEMES[c.name][1].uses_position for c in model.settings.kinds.values())
    plain = nll(model, tokens, [places] * WINDOWS)
    if not reads:
        return float(plain.mean()), None, None
    shuffled = []
    for _ in range(WINDOWS):
        position = torch.from_numpy(rng.permutation(length))[None]
        shuffled.append(replace(places, position=position, unit_steps=False))
    difference = nll(model, tokens, shuffled) - plain
    if not difference.any():  # bitwise equal: this variant of the scheme does not read them
        return float(plain.mean()), None, None
    half = 2.0 * difference.std(ddof=1) / len(difference) ** 0.5
    permuted = plain.mean() + difference.mean()
    return float(plain.mean()), float(permuted), float(difference.mean() - half)


def nll(model: Transformer, tokens: torch.Tensor, places: list[TokenPositions]) -> np.ndarray:
    """(windows,) mean NLL of the second half of each window."""
    half = tokens.shape[1] // 2
    return np.array(
        [
            float(model(row[None, :-1], where, targets=row[None, 1:])[0, half:].double().mean())
            for row, where in zip(tokens, places, strict=True)
        ]
    )


def table_csv(rows: list[SchemeRow]) -> str:
    out = io.StringIO()
    names = [f.name for f in fields(SchemeRow) if f.name not in ("nll", "unmoved")]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *(f"nll_{m}x" for m in MULTIPLES), "unmoved"])
    for row in rows:
        measured = [row.nll[str(m)] for m in MULTIPLES]
        writer.writerow([*(getattr(row, n) for n in names), *measured, " ".join(row.unmoved)])
    return out.getvalue()


def report(rows: list[SchemeRow], failures: dict[str, list[str]], settings: RunSettings) -> str:
    def number(x: float | None) -> str:
        return "–" if x is None else f"{x:.3f}"

    l0, steps = settings.train_length, settings.steps
    lines = [
        f"# All positional schemes, {steps} steps",
        "",
        f"`{shlex.join(['python', *sys.argv])}`; {platform.machine()}, {os.cpu_count()} cores, no GPU, "
        f"torch {torch.__version__}. One seed, {settings.training.tokens:,} tokens ({steps} steps) at {l0}. "
        "It shows that each scheme learns and uses positions, and roughly how its loss changes beyond the "
        "trained length. It is not a ranking: that requires more tokens and several seeds.",
        "",
        "NLL in nats per token, at every length on the same held-out targets. *Learned*: parameters of the "
        "scheme. *Below unigram*: NLL of a unigram model of the training text minus NLL at the trained "
        "length. *Permuted*: increase when the positions of 64 held-out windows are permuted, and the lower "
        "end of its 95% interval over windows (– if no layer reads position numbers). *s*: seconds of "
        "training on one core of a shared machine.",
        "",
        "| configuration | schemes | learned | below unigram | "
        + " | ".join(f"{m}× ({l0 * m})" for m in MULTIPLES)
        + " | permuted | s |",
        "|---|---|---|---|" + "---|" * (len(MULTIPLES) + 2),
    ]
    for row in rows:
        gap = None if row.nll["1"] is None else row.unigram - row.nll["1"]
        harm = "–"
        if row.permuted is not None and row.permuted_low is not None:
            harm = f"{row.permuted - row.plain:+.3f} (≥ {row.permuted_low:.3f})"
        cells = " | ".join(number(row.nll[str(m)]) for m in MULTIPLES)
        name = row.name + deeper(row, settings)
        lines.append(
            f"| {name} | {row.scheme} | {row.learned:,} | {number(gap)} | {cells} | {harm} "
            f"| {row.seconds:.0f} |"
        )
    short = [r.name for r in rows if r.nll["1"] is None or r.unigram - r.nll["1"] < 0.3]
    blind = [r.name for r in rows if r.permuted_low is not None and r.permuted_low <= 0]
    still = [f"{r.name}: {', '.join(r.unmoved)}" for r in rows if r.unmoved]
    probed = [r for r in rows if r.permuted_low is not None]
    lines += [
        "",
        f"- At least 0.3 nats below the unigram model: {len(rows) - len(short)} of {len(rows)}"
        + (f"; not: {', '.join(short)}." if short else "."),
        f"- Worse with permuted positions (interval above 0): {len(probed) - len(blind)} of {len(probed)}"
        + (f"; not: {', '.join(blind)}." if blind else "."),
        f"- Parameters of the scheme that training did not change: {'; '.join(still) if still else 'none'}.",
    ]
    lines += [f"- Failed: {name}: {' '.join(why)}" for name, why in failures.items()]
    return "\n".join(lines) + "\n"


def deeper(row: SchemeRow, settings: RunSettings) -> str:
    return "" if row.layers == settings.model.layers else f" ({row.layers} layers)"


if __name__ == "__main__":
    run_main(main)
