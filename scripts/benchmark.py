"""Compare speed and memory with transformers, and positional schemes and mixers with RoPE.

    python scripts/benchmark.py                                      all cases of shapes A and B
    python scripts/benchmark.py --shapes A --cases decode-1 decode-8
    python scripts/benchmark.py --cases scheme-train scheme-decode --schemes alibi kda
    python scripts/benchmark.py --device cuda --shapes 125M 1.1B

Every measurement is a fresh process: the baseline and the others take turns for --rounds rounds, on
the same random weights and tokens, with two calls for warm-up. Losses, logits and generated tokens
are compared before any time is reported. Training is also measured in bfloat16 where the processor
has the instruction, and only in bfloat16 on a GPU.

With one thread (the default) the time is the CPU time of the process, which does not count the time
that other processes use. Ratios of medians hold better on a busy machine than speeds.

The results are written to docs/benchmarks: cpu.csv or gpu/<card>.csv, in which a row replaces an
earlier one of its kind, and a page with the table. A case that fails does not stop the others; the
exit status is then 1.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needs no installation

from data.files import write_text
from errors import TrainingError
from evaluation.reports.document import markdown_table
from evaluation.scoring.text_loss import ModelScorer
from generation.decoding import Generation
from generation.sampling import SamplingParams
from interop.extras import load_extra
from interop.huggingface.families import FAMILIES
from model import SCHEMES, TokenPositions, Transformer
from model.decoding import pack
from model.devices import find_device, prepare_cpu
from run_directory.console import Console
from run_directory.precision import has_bfloat16
from run_directory.run import processor
from run_directory.run_settings import RunSettings
from run_directory.training_settings import AdamWSettings
from settings.load import load_settings
from settings.script import Parser, run_main
from training.hardware import known_peak, peak_memory
from training.optimizer import Optimizer

ROOT = Path(__file__).resolve().parent.parent
MIXERS = ["deltanet", "gated_deltanet", "gla", "kda", "linear", "mamba2", "retnet"]
PREFILL = 2048
PROMPT = 32
NEW = 128  # generated tokens of a row
WINDOWS = 4  # of fixed targets
TARGETS = 64
SCHEME_LENGTH = 2048
LONG_LENGTH = 16_384
NEAR_TIE = 1e-3  # logits that rounding may swap
LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05}  # of losses and logits
KEYS = ["case", "shape", "variant", "threads"]
HEAD = """# Speed of {machine}

`python scripts/benchmark.py`, torch {torch}. Shape A has 4 layers of width 256, 8 query and 4 key/value
heads, FFN 688, vocabulary 4,096, training steps of 8 x 512 tokens; B 6 layers of width 288, 6 heads, FFN
768, vocabulary 32,000, steps of 8 x 256; 125M and 1.1B are configs/base.yaml and configs/1b.yaml.

All variants of a case take turns in fresh processes, on equal weights and tokens; transformers with its
SDPA attention. `ratio` compares the median speed with the baseline's, `of the fastest` the fastest samples;
above 1 is faster. `busy`: CPU time over wall time and threads; below 0.9 other processes used the core and
its caches. `of the peak`: of the GPU's bfloat16 peak (`train`) or of the bandwidth of a copy
(`decode`). `checked`: the largest difference of losses or logits from the baseline's, or the share of
generated tokens that is equal, each of them the most likely token of a full pass within 0.001.

Cases: `train` is a step with fused AdamW; `prefill` 2,048 tokens through the cache; `decode-N` greedy
generation of N rows after 32 tokens; `fixed-targets` the last 64 of 2,048 tokens; `long-train` a training
step on one window of 16,384 tokens; `scheme-train` and `scheme-decode` a step on one window of 2,048 tokens
(four on a GPU), and generation of one row, beside RoPE. Measured by an earlier version: `core`, the forward
and backward pass of Gated DeltaNet's recurrence, 8 heads of 32, 2,048 tokens, beside causal attention;
`context-decode`, 128 tokens after a context of this many tokens, of a hybrid of three layers of Gated
DeltaNet and one of attention with a window of 256 tokens.

"""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its training step; `words`: arguments of train.py."""

    words: str
    vocab: int
    length: int
    batch: int


SHAPES = {
    "tiny": Shape(
        "model.layers=1 model.dim=32 model.heads=2 model.kv_heads=1 model.ffn_dim=32",
        vocab=256,
        length=64,
        batch=2,
    ),
    "A": Shape(
        "model.layers=4 model.dim=256 model.heads=8 model.kv_heads=4 model.ffn_dim=688",
        vocab=4096,
        length=512,
        batch=8,
    ),
    "B": Shape(
        "model.layers=6 model.dim=288 model.heads=6 model.kv_heads=6 model.ffn_dim=768",
        vocab=32_000,
        length=256,
        batch=8,
    ),
    "125M": Shape("configs/base.yaml", vocab=32_000, length=1024, batch=32),
    "1.1B": Shape("configs/1b.yaml", vocab=32_000, length=2048, batch=4),
}


@dataclass(frozen=True)
class Workload:
    """What one process measures. `variant`: ``ours``, ``transformers``, or a scheme or mixer; then
    ``compiled`` and ``bfloat16`` if they apply."""

    case: str
    shape: str
    variant: str
    device: str
    threads: int
    repeats: int

    @property
    def is_theirs(self) -> bool:
        return self.variant.startswith("transformers")

    @property
    def is_half(self) -> bool:
        return self.variant.endswith("bfloat16")

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]

    def tokens(self, rows: int, count: int) -> Tensor:
        """(rows, count) random token ids."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.sizes.vocab, (rows, count), generator=generator).to(self.device)

    def autocast(self) -> AbstractContextManager:
        if not self.is_half:
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def our_model(self) -> Transformer:
        words = self.sizes.words.split()
        scheme = self.variant.split()[0]
        if scheme in MIXERS:
            words += [f"configs/mixer/{scheme}.yaml", "model.kv_heads=null"]
        elif scheme in SCHEMES:
            words.append(f"model.position.name={scheme}")
        if scheme == "learned":
            words.append(f"model.position.max_length={4 * SCHEME_LENGTH}")
        settings = load_settings(RunSettings, words).model
        model = Transformer(settings, self.sizes.vocab, self.sizes.length)
        return model.initialize(0).eval().to(self.device)

    def their_model(self) -> Any:
        """transformers' Llama with the weights of `our_model`."""
        transformers = load_extra("transformers")
        ours = self.our_model()
        settings = ours.settings
        config = transformers.LlamaConfig(
            vocab_size=self.sizes.vocab,
            hidden_size=settings.dim,
            intermediate_size=settings.ffn_dim,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            max_position_embeddings=1 << 18,
            rms_norm_eps=settings.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        own = ours.state_dict()
        names, _ = FAMILIES["llama"].weight_map(settings, own)
        theirs = transformers.LlamaForCausalLM(config).eval()
        theirs.load_state_dict(
            {name: torch.cat([own[part] for part in parts]) for name, parts in names.items()}
        )
        return theirs.to(self.device)


@dataclass(frozen=True)
class Task:
    """What is timed: `call` returns the numbers that must agree between variants. `ideal`: seconds
    of a call at the peak of a GPU; 0: unknown."""

    call: Callable[[], list[float]]
    tokens: int
    ideal: float = 0.0


@dataclass(frozen=True)
class Measured:
    """The result of one process: seconds of CPU time and wall time of each repetition, the checked
    numbers of the first call, and peak memory in bytes."""

    cpu: list[float]
    wall: list[float]
    tokens: int
    ideal: float
    checked: list[float]
    peak: int


def train(work: Workload, rows: int | None = None, length: int | None = None) -> Task:
    """A training step: forward and backward pass and fused AdamW. Numbers: the loss."""
    rows = rows or work.sizes.batch
    length = length or work.sizes.length
    tokens = work.tokens(rows, length + 1)
    inputs = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].contiguous()
    is_compiled = "compiled" in work.variant
    ideal = 0.0
    if work.is_theirs:
        theirs = work.their_model().train()
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, fused=True)
        model = torch.compile(theirs) if is_compiled else theirs

        def loss() -> Tensor:
            return model(inputs, labels=targets, shift_labels=targets, use_cache=False).loss
    else:
        ours = work.our_model().train()
        (optimizer,) = Optimizer(ours, AdamWSettings(lr=1e-3)).parts
        positions = TokenPositions.plain(length, device=inputs.device)
        if is_compiled:
            ours.compile(dynamic=True)
        if work.device != "cpu":
            ideal = targets.numel() * ours.flops_per_token(length) / peak_flops(inputs.device)

        def loss() -> Tensor:
            return ours(inputs, positions, targets, reduction="sum") / targets.numel()

    def step() -> list[float]:
        with work.autocast():
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [float(value.detach())]

    return Task(step, targets.numel(), ideal)


def prefill(work: Workload) -> Task:
    """A prompt through an empty cache, with the logits of its last token."""
    ids = work.tokens(1, PREFILL)
    if work.is_theirs:
        theirs = work.their_model()

        def run() -> Tensor:
            return theirs(ids, use_cache=True, logits_to_keep=1).logits
    else:
        ours = work.our_model()
        positions = TokenPositions.plain(PREFILL, device=ids.device)

        def run() -> Tensor:
            return ours(ids, positions, cache=ours.make_cache(1, PREFILL), keep=1)

    def call() -> list[float]:
        with torch.inference_mode(), work.autocast():
            return run().flatten()[:: work.sizes.vocab // 64].tolist()

    return Task(call, PREFILL)


def decode(work: Workload, rows: int) -> Task:
    """Greedy generation after a short prompt, which is part of the time. Numbers: the tokens."""
    ids = work.tokens(rows, PROMPT)
    dtype = torch.bfloat16 if work.is_half else torch.float32
    ideal = 0.0
    if work.is_theirs:
        theirs = work.their_model().to(dtype)
        mask = torch.ones_like(ids)

        def generate() -> Tensor:
            out = theirs.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
            return out[:, PROMPT:]

        def logits(row: Tensor) -> Tensor:
            return theirs(row[None]).logits[0]
    else:
        ours = pack(work.our_model().to(dtype))
        if work.device != "cpu":
            weights = sum(x.numel() for x in ours.parameters()) - ours.embed.weight.numel()
            ideal = NEW * weights * dtype.itemsize / bandwidth(ids.device)

        def generate() -> Tensor:
            steps = list(Generation(ours, ids.tolist(), NEW, SamplingParams(temperature=0)))
            return torch.tensor(steps, device=ids.device).T

        def logits(row: Tensor) -> Tensor:
            return ours(row[None], TokenPositions.plain(len(row), device=row.device))[0]

    if not work.is_half:
        check_greedy(logits, ids, generate())
    return Task(lambda: generate().flatten().tolist(), rows * NEW, ideal)


@torch.inference_mode()
def check_greedy(
    logits: Callable[[Tensor], Tensor],
    prompts: Tensor,
    generated: Tensor,
) -> None:
    """Raise ValueError unless every generated token is the most likely of a full pass, within
    NEAR_TIE."""
    for prompt, row in zip(prompts, generated, strict=True):
        out = logits(torch.cat([prompt, row[:-1]]))[-len(row) :]
        short = float((out.amax(-1) - out.gather(-1, row[:, None])[:, 0]).max())
        if short > NEAR_TIE:
            raise ValueError(f"a generated token has a logit {short:.2g} below the largest one")


def peak_flops(device: torch.device) -> float:
    """FLOP/s in bfloat16: of the data sheet, else those of a product of large matrices."""
    if peak := known_peak(device):
        return peak
    n = 8192  # saturates a GPU
    x = torch.ones(n, n, dtype=torch.bfloat16, device=device)
    seconds = []
    for _ in range(8):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        _ = x @ x
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds[2:])  # the first ones choose kernels and allocate memory


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    y = x.clone()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        y.copy_(x)
    torch.cuda.synchronize()
    return 20 * x.numel() / (time.perf_counter() - start)


def fixed_targets(work: Workload) -> Task:
    """The last TARGETS targets of windows of PREFILL tokens. Numbers: their mean NLL."""
    ids = work.tokens(WINDOWS, PREFILL + 1)
    if work.is_theirs:
        theirs = work.their_model()

        @torch.no_grad()
        def nll(window: Tensor) -> float:
            out = theirs(window[:, :-1], logits_to_keep=TARGETS, use_cache=False)
            return float(F.cross_entropy(out.logits[0].float(), window[0, -TARGETS:]))
    else:
        scorer = ModelScorer(work.our_model(), device=work.device)

        def nll(window: Tensor) -> float:
            return float(np.mean(scorer(window.cpu().numpy(), TARGETS)))

    def call() -> list[float]:
        with work.autocast():
            return [sum(nll(window[None]) for window in ids) / WINDOWS]

    return Task(call, WINDOWS * PREFILL)


CASES: dict[str, Callable[[Workload], Task]] = {
    "train": train,
    "prefill": prefill,
    "decode-1": lambda work: decode(work, 1),
    "decode-8": lambda work: decode(work, 8),
    "decode-64": lambda work: decode(work, 64),
    "fixed-targets": fixed_targets,
    "long-train": lambda work: train(work, 1, LONG_LENGTH),
    "scheme-train": lambda work: train(work, 1 if work.device == "cpu" else 4, SCHEME_LENGTH),
    "scheme-decode": lambda work: decode(work, 1),
}


def comparisons(case: str, device: str, schemes: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(baseline, variants) that are measured in turns."""
    is_cpu = device == "cpu"
    if case.startswith(("scheme", "long")):
        names = schemes if case.startswith("scheme") else ["gated_deltanet"]
        on_gpu = " bfloat16" if case == "scheme-decode" else " compiled bfloat16"
        precision = "" if is_cpu else on_gpu
        for name in names:
            if name != "rope":
                yield f"rope{precision}", [f"{name}{precision}"]
    else:
        names = ["ours"]
        if case == "train":
            names += ["ours compiled", "transformers compiled"]
        if is_cpu:
            yield "transformers", names
        if not is_cpu or (case == "train" and has_bfloat16(torch.device("cpu"))):
            yield "transformers bfloat16", [f"{name} bfloat16" for name in names]


def measure(work: Workload) -> Measured:
    """Time a workload in this process after two calls for warm-up."""
    prepare_cpu(work.threads)
    if work.device == "cpu" and work.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    task = CASES[work.case](work)
    if work.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    checked = task.call()
    task.call()
    cpu = []
    wall = []
    for _ in range(work.repeats):
        cpu_start = time.process_time()
        start = time.perf_counter()
        task.call()
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - start)
    peak = peak_memory(torch.device(work.device))
    return Measured(cpu, wall, task.tokens, task.ideal, checked, peak)


def run_apart(work: Workload) -> Measured:
    """`measure` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--workload", json.dumps(asdict(work))],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(work.threads)},
        cwd=ROOT,
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise TrainingError(f"{work.case}, {work.variant}: {done.stderr.strip().splitlines()[-1]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def compare(works: Sequence[Workload], rounds: int) -> list[dict]:
    """Rows of variants, the first of which is the baseline, measured in turns."""
    processes = [[run_apart(work) for work in works] for _ in range(rounds)]
    by_variant = list(zip(*processes, strict=True))
    is_cpu_time = works[0].device == "cpu" and works[0].threads == 1
    rows = []
    reference: list[float] = []
    reference_tokens = by_variant[0][0].tokens
    for work, own in zip(works, by_variant, strict=True):
        cpu = [seconds for process in own for seconds in process.cpu]
        wall = [seconds for process in own for seconds in process.wall]
        times = cpu if is_cpu_time else wall
        reference = reference or times
        median = statistics.median(times)
        more = own[0].tokens / reference_tokens
        rows.append(
            {
                "case": work.case,
                "shape": work.shape,
                "variant": work.variant,
                "threads": work.threads,
                "baseline": works[0].variant,
                "tokens_per_second": own[0].tokens / median,
                "ratio": more * statistics.median(reference) / median,
                "ratio_of_fastest": more * min(reference) / min(times),
                "busy": sum(cpu) / sum(wall) / work.threads,
                "of_the_peak": own[0].ideal / median or None,
                "samples": len(times),
                "peak_mib": max(process.peak for process in own) / 2**20,
                "checked": agreement(work, by_variant[0][0].checked, own[0].checked),
                "date": time.strftime("%Y-%m-%d"),
            }
        )
    return rows


def agreement(work: Workload, baseline: list[float], other: list[float]) -> str:
    """How well the checked numbers agree. Raises TrainingError if they do not."""
    if not baseline or work.case.startswith(("scheme", "long")):
        return ""
    pairs = list(zip(baseline, other, strict=True))
    if work.case.startswith("decode"):
        return f"{sum(a == b for a, b in pairs) / len(pairs):.1%} of tokens equal"
    largest = max(abs(a - b) for a, b in pairs)
    if not largest <= LARGEST_DIFFERENCE["bfloat16" if work.is_half else "float32"]:
        raise TrainingError(f"{work.case}, {work.variant}: results differ by {largest:.2g}")
    return f"difference {largest:.1e}"


def save(rows: Sequence[dict], file: Path, machine: str) -> None:
    """Add rows to a CSV file, in place of earlier ones of their kind, and write its page."""
    known = [pd.read_csv(file, keep_default_na=False)] if file.exists() else []
    table = pd.concat([*known, pd.DataFrame(rows)]).drop_duplicates(KEYS, keep="last")
    # Results of earlier versions have further cases.
    order = {name: i for i, name in enumerate(dict.fromkeys([*CASES, *table["case"]]))}
    table = table.sort_values(
        ["shape", "case"],
        key=lambda column: column.map(order) if column.name == "case" else column,
        kind="stable",
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, table.to_csv(index=False, float_format="%.4g"))
    write_page(file, machine)


def write_page(file: Path, machine: str) -> None:
    """The page beside a CSV file of results."""
    columns = {  # and their formats
        "tokens_per_second": "{:,.0f}",
        "ratio": "{:.2f}",
        "ratio_of_fastest": "{:.2f}",
        "busy": "{:.2f}",
        "of_the_peak": "{:.0%}",
        "peak_mib": "{:,.0f}",
    }
    table = pd.read_csv(file, keep_default_na=False)
    for name, form in columns.items():
        table[name] = [x if x == "" else form.format(float(x)) for x in table[name]]
    table = table.drop(columns=["threads"]).rename(
        columns={
            "tokens_per_second": "tokens/s",
            "ratio_of_fastest": "of the fastest",
            "of_the_peak": "of the peak",
            "peak_mib": "peak, MiB",
        }
    )
    head = HEAD.format(machine=machine, torch=torch.__version__)
    rows = markdown_table(list(table.columns), table.to_numpy().tolist())
    write_text(file.with_suffix(".md"), f"{head}{rows}\n")


def main() -> int:
    if sys.argv[1:2] == ["--workload"]:
        print(json.dumps(asdict(measure(Workload(**json.loads(sys.argv[2]))))))
        return 0
    known = [*SCHEMES, *MIXERS]
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", default=["A", "B"], choices=SHAPES)
    add("--cases", nargs="+", default=[*CASES], choices=CASES, metavar="CASE")
    add("--schemes", nargs="+", default=known, choices=known, metavar="SCHEME")
    add("--device", default="cpu", help="cpu (the default) or cuda")
    add("--threads", type=int, default=1, help="of each process (default: 1)")
    add("--rounds", type=int, default=3, help="processes of each variant (default: 3)")
    add("--repeats", type=int, default=5, help="samples of each process (default: 5)")
    add("--results", type=Path, default=ROOT / "docs" / "benchmarks", help="folder")
    options = parser.parse_args()
    for name in ("threads", "rounds", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name}: must be at least 1")
    device = find_device(options.device)
    file = options.results / "cpu.csv"
    machine = f"{os.cpu_count()} cores of {processor()}"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
        file = options.results / "gpu" / f"{re.sub('[^a-z0-9]+', '-', machine.lower())}.csv"
    console = Console()
    failures = 0
    for case in options.cases:
        for shape in options.shapes[:1] if case == "core" else options.shapes:
            for baseline, variants in comparisons(case, device.type, options.schemes):
                works = [
                    Workload(case, shape, name, str(device), options.threads, options.repeats)
                    for name in (baseline, *variants)
                ]
                try:
                    rows = compare(works, options.rounds)
                except TrainingError as error:
                    console.warn(str(error))
                    failures += 1
                    continue
                save(rows, file, machine)
                for row in rows:
                    console.info(
                        f"{case} {shape} {row['variant']}: {row['tokens_per_second']:,.0f} tokens/s, "
                        f"ratio {row['ratio']:.2f}, {row['checked'] or 'not compared'}"
                    )
    return int(failures > 0)


if __name__ == "__main__":
    run_main(main)
