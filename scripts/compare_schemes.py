"""Train every positional scheme on the same text in the same order; measure each past its trained length.

    python scripts/compare_schemes.py                          all of configs/position/ and configs/mixer/
    python scripts/compare_schemes.py --jobs 2                 two at a time, one thread each
    python scripts/compare_schemes.py configs/position/rope.yaml configs/position/t5.yaml
    python scripts/compare_schemes.py --words training.tokens=2M seed=1

For each scheme: NLL at 1×, 2×, 4× and 8× the trained length on the same targets (evaluate.py), the unigram
model beside it, NLL with the positions of each window permuted (order, and so visibility, is left alone),
and whether everything the scheme learns has moved. Runs go to runs/schemes/, results to
docs/results/schemes.md and .csv. The same call goes on where it was interrupted.
"""

import argparse
import csv
import io
import json
import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import yaml

from data import open_prepared
from data.files import write_text
from model import SCHEMES, Places, Transformer
from training.config import load_settings
from training.console import Console, run_main
from training.files import read_json, write_json
from training.run import MANIFEST, load
from training.settings import RunSettings

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "configs" / "comparison" / "schemes.yaml"
MULTIPLES = (1, 2, 4, 8)
WINDOWS, PROBE_SEED = 64, 0


@dataclass(frozen=True)
class Row:
    """One scheme's line. NLL in nats per token; None where the scheme has no such length or position."""

    name: str
    checkpoint: str  # hash of what was measured
    layers: int
    scheme: str
    parameters: int
    learned: int  # parameters of the positional scheme
    seconds: float  # of training, on what else the machine did
    unigram: float
    nll: dict[str, float | None]  # by multiple of the trained length, "1" ... "8"
    plain: float  # of the permutation probe's windows, as they are
    permuted: float | None  # the same windows, positions permuted
    permuted_low: float | None  # lower end of the 95% interval of permuted − plain
    unmoved: list[str]  # learned parameters of the scheme that are where they started


def main() -> int:
    options = parse()
    files = [Path(f) for f in options.files] or everything()
    console, folder = Console(), Path(options.runs)
    missing = set(SCHEMES) - {kind for f in files for kind in schemes_of(f)}
    if missing and not options.files:
        console.say(f"no settings file uses: {', '.join(sorted(missing))}")
    rows, failures = {}, {}
    load_settings(RunSettings, [str(BASE), *options.words])  # refuses wrong words at once

    def one(file: Path) -> None:
        try:
            rows[file.stem] = measure(file, folder / file.stem, [*deep_enough(file), *options.words])
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or error.stdout or "").strip().splitlines()
            failures[file.stem] = [line for line in lines if line.startswith("error:")] or lines[-1:]
            console.say(f"{file.stem}: {failures[file.stem]}")

    subprocess.run(  # once, before several runs ask for it
        [sys.executable, "scripts/prepare.py", str(BASE), *options.words], cwd=ROOT, check=True
    )
    with console.bar("schemes", len(files), "schemes") as bar, ThreadPoolExecutor(options.jobs) as pool:
        for _ in as_completed([pool.submit(one, file) for file in files]):
            bar.advance(1)
    ordered = [rows[f.stem] for f in files if f.stem in rows]
    text = report(ordered, failures, load_settings(RunSettings, [str(BASE), *options.words]))
    out = Path(options.out)
    write_text(out.with_suffix(".md"), text)
    write_text(out.with_suffix(".csv"), table_csv(ordered))
    print(text)
    return 1 if failures else 0


def everything() -> list[Path]:
    configs = ROOT / "configs"
    return sorted((configs / "position").glob("*.yaml")) + sorted((configs / "mixer").glob("*.yaml"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE.yaml", help="default: all of configs/position/ and configs/mixer/"
    )
    parser.add_argument("--jobs", type=int, default=1, help="schemes at once, one thread each")
    parser.add_argument("--runs", default="runs/schemes", help="folder of the runs")
    parser.add_argument("--out", default="docs/results/schemes", help="results, without the ending")
    parser.add_argument("--words", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every run")
    return parser.parse_args()


def schemes_of(file: Path) -> set[str]:
    """Names of the schemes a settings file chooses."""
    model = load_settings(RunSettings, [str(BASE), str(file), *deep_enough(file)]).model
    return {choice.name for choice in model.kinds.values()}


def deep_enough(file: Path) -> list[str]:
    """Words that give the model a layer for each place of a pattern."""
    position = (yaml.safe_load(file.read_text(encoding="utf-8")).get("model") or {}).get("position") or {}
    base = load_settings(RunSettings, [str(BASE)]).model.layers
    needed = len(position.get("layers") or [])
    return [f"model.layers={needed}"] if needed > base else []


def measure(file: Path, run: Path, words: list[str]) -> Row:
    """Train, evaluate and probe one scheme; what is done already is read back.

    train.py is always asked: it refuses a run folder of other settings, and has nothing to do in a finished
    one.
    """
    found = run / "comparison.json"
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}

    def call(*line: str) -> None:
        subprocess.run(
            [sys.executable, *line], cwd=ROOT, env=one_thread, check=True, capture_output=True, text=True
        )

    call("train.py", str(BASE), str(file), "--folder", str(run), "training.threads=1", *words)
    loaded = load(run)
    if found.is_file() and read_json(found).get("checkpoint") == loaded.checkpoint_hash:
        return Row(**read_json(found))
    l0 = loaded.settings.train_length
    lengths = [l0 * m for m in MULTIPLES if loaded.model.limit is None or l0 * m <= loaded.model.limit]
    asked = ["folder=comparison", f"lengths={lengths}", "targets=64", "documents=40", "spans_per_document=1"]
    # The standard library's source repeats itself by some 4%: such targets are dropped, no reason to stop.
    call("evaluate.py", str(run), *asked, "rules=[trained]", "contamination.limit=0.1")
    results = read_json(run / "evaluation" / "comparison" / "results.json")
    nll = {str(c["length"] // l0): c["nll"] for c in results["cells"] if c["rule"] == "trained"}
    plain, permuted, low = probe(loaded.model, run)
    learned = [(n, p) for n, p in loaded.model.named_parameters() if "position" in n.split(".")]
    fresh = Transformer(
        loaded.settings.model, loaded.model.vocab_size, l0, loaded.settings.original_length
    ).initialise(loaded.settings.seed)
    start = dict(fresh.named_parameters())
    row = Row(
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
    """Mean NLL of held-out windows as they are and with permuted positions; the lower end of the 95% interval
    of the difference over windows. None where no layer reads positions."""
    store = open_prepared(read_json(run / MANIFEST)["data"]).valid
    length, rng = model.train_length, np.random.default_rng(PROBE_SEED)
    long = np.flatnonzero(store.lengths > length)
    windows = []
    for document in rng.choice(long, WINDOWS):
        text = store.document(int(document))
        start = rng.integers(0, len(text) - length)
        windows.append(np.asarray(text[start : start + length + 1], dtype=np.int64))
    tokens = torch.from_numpy(np.stack(windows))
    places = Places.plain(length)
    reads = any(SCHEMES[c.name][1].uses_position for c in model.settings.kinds.values())
    plain = nll(model, tokens, [places] * WINDOWS)
    if not reads:
        return float(plain.mean()), None, None
    shuffled = []
    for _ in range(WINDOWS):
        position = torch.from_numpy(rng.permutation(length))[None]
        shuffled.append(replace(places, position=position, unit_steps=False))
    difference = nll(model, tokens, shuffled) - plain
    if not difference.any():  # to the last bit: this variant of the scheme does not read them
        return float(plain.mean()), None, None
    half = 2.0 * difference.std(ddof=1) / len(difference) ** 0.5
    permuted = plain.mean() + difference.mean()
    return float(plain.mean()), float(permuted), float(difference.mean() - half)


def nll(model: Transformer, tokens: torch.Tensor, places: list[Places]) -> np.ndarray:
    """(windows,) mean NLL of each window's second half: a full half window of context."""
    half = tokens.shape[1] // 2
    return np.array(
        [
            float(model(row[None, :-1], where, targets=row[None, 1:])[0, half:].double().mean())
            for row, where in zip(tokens, places, strict=True)
        ]
    )


def table_csv(rows: list[Row]) -> str:
    out = io.StringIO()
    names = [f.name for f in fields(Row) if f.name not in ("nll", "unmoved")]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *(f"nll_{m}x" for m in MULTIPLES), "unmoved"])
    for row in rows:
        measured = [row.nll[str(m)] for m in MULTIPLES]
        writer.writerow([*(getattr(row, n) for n in names), *measured, " ".join(row.unmoved)])
    return out.getvalue()


def report(rows: list[Row], failures: dict[str, list[str]], settings: RunSettings) -> str:
    def number(x: float | None) -> str:
        return "–" if x is None else f"{x:.3f}"

    l0, steps = settings.train_length, settings.steps
    lines = [
        "# Every positional scheme, trained and stretched",
        "",
        f"`{shlex.join(['python', *sys.argv])}`; {platform.machine()}, {os.cpu_count()} cores, no GPU, "
        f"torch {torch.__version__}. One seed, {settings.training.tokens:,} tokens ({steps} steps) at {l0}. "
        "It shows that each scheme learns and uses positions, and the rough shape past the trained length; "
        "it ranks nothing: differences between schemes need more tokens and several seeds.",
        "",
        "NLL in nats per token, at every length on the same held-out targets. *Below unigram*: how far it is "
        "at the trained length below the unigram model of the training text. *Permuted*: what permuting the "
        "positions of 64 held-out windows adds, and the lower end of its 95% interval over windows (– where "
        "no layer reads position numbers). *s*: seconds of training on one core beside other work.",
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
        f"- Learned parameters of the scheme that did not move: {'; '.join(still) if still else 'none'}.",
    ]
    lines += [f"- Failed: {name}: {' '.join(why)}" for name, why in failures.items()]
    return "\n".join(lines) + "\n"


def deeper(row: Row, settings: RunSettings) -> str:
    return "" if row.layers == settings.model.layers else f" ({row.layers} layers)"


if __name__ == "__main__":
    run_main(main)
