"""Compare speed and memory with transformers, and positional schemes and mixers with RoPE.

    python scripts/benchmark.py                                      all cases but train-8, of shapes A and B
    python scripts/benchmark.py --shapes A --cases decode-1 decode-8
    python scripts/benchmark.py --cases scheme-train scheme-decode --schemes alibi kda
    python scripts/benchmark.py --device cuda --shapes 125M 1.1B

Every variant is a process of its own. After two calls for warm-up the baseline and the others take
turns for --rounds rounds, on the same random weights and tokens. Losses, logits and generated tokens
are compared before any time is reported. Training is also measured in bfloat16 where the processor
has the instruction, and only in bfloat16 on a GPU.

With one thread (the default) the time is the CPU time of the process, which does not count the time
that other processes use. Ratios of medians hold better on a busy machine than speeds.

The results are written to docs/benchmarks: cpu.csv or gpu/<card>.csv, in which a row replaces an
earlier one of its kind, and a page with the table; on a GPU also gpu/<card>_kernels.csv, the time of
each kernel. A variant that fails does not stop the others; the exit status is then 1.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

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
from run_directory.position_overrides import meta_model
from run_directory.precision import has_bfloat16
from run_directory.run import processor
from run_directory.run_settings import RunSettings
from run_directory.training_schedule import TrainingSchedule
from scripts.plain_llama import plain_llama
from settings.load import load_settings
from settings.script import Parser, run_main
from train import train_step
from training.hardware import known_peak, peak_memory
from training.micro_batches import MicroBatch, StepBatch
from training.parallel import Parallel
from training.stop_requests import StopRequests
from training.train_state import TrainState

ROOT = Path(__file__).resolve().parent.parent
MIXERS = ["deltanet", "gated_deltanet", "gla", "kda", "linear", "mamba2", "retnet"]
PREFILL = 2048
PROMPT = 32
WINDOWS = 4  # of fixed targets
TARGETS = 64
SCHEME_LENGTH = 2048
LONG_LENGTH = 16_384
NEAR_TIE = 1e-3  # logits that rounding may swap
LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05}  # of losses and logits
# words of a variant, and what they add to the settings of training
FASTER = {
    "residual": "training.residual_dtype=autocast",
    "graphs": "training.cuda_graphs=true",
}
KEYS = ["case", "shape", "variant", "threads"]
ACCUMULATED = 8  # micro-batches of train-8
PROFILED = 3  # calls, if they do not generate
KERNELS = 40  # of a step, the longest ones
WARM_SHARE = 0.75  # of the time of a comparison
THREADS_ON_GPU = 4  # that draw the random weights
HEAD = """# Speed of {machine}

`python scripts/benchmark.py`, torch {torch}. Shape A has 4 layers of width 256, 8 query and 4 key/value
heads, FFN 688, vocabulary 4,096, training steps of 8 x 512 tokens; B 6 layers of width 288, 6 heads, FFN
768, vocabulary 32,000, steps of 8 x 256; 125M and 1.1B are configs/base.yaml and configs/1b.yaml.

All variants of a case take turns, each in a process of its own, on equal weights and tokens; transformers
with its SDPA attention, `llama` is scripts/plain_llama.py. `ratio` compares the median speed with the
baseline's, `of the fastest` the fastest samples; above 1 is faster. `busy`: CPU time over wall time and
threads; below 0.9 other processes used the core and its caches. `ms`: of a step, in `decode` of a token after
the first; `kernels, ms`: the sum of its GPU kernels. `of the peak`: of the GPU's bfloat16 peak (`train`) or
of the bandwidth of a copy, measured alone (`decode`, whose share of the peak is `MFU`). `first call, s`: with its compilation.
`checked`: the largest difference of losses or logits from the baseline's, or the share of generated tokens
that is equal, each of them the most likely token of a full pass within 0.001.
The peak counts 6 FLOPs for each weight and token (2 in generation) and attention to earlier tokens only; the
bandwidth counts one read of the weights and of the cache for each step. `residual` and `graphs` are
training.residual_dtype=autocast and training.cuda_graphs=true.

Cases: `train` is a step with fused AdamW that waits for its loss, `train-8` one of eight micro-batches;
`prefill` 2,048 tokens through the cache; `decode-N` greedy generation of 128 tokens for each of N rows after 32
tokens; `fixed-targets` the last 64 of 2,048 tokens; `long-train` a training step on one window of 16,384
tokens; `scheme-train` and `scheme-decode` a step on one window of 2,048 tokens
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
    new: int = 128  # generated tokens of a row


SHAPES = {
    "tiny": Shape(
        "model.layers=1 model.dim=32 model.heads=2 model.kv_heads=1 model.ffn_dim=32 "
        "training.validation.targets=8",
        vocab=256,
        length=16,
        batch=2,
        new=8,
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
    """What one process measures. `variant`: ``ours``, ``transformers``, ``llama``, or a scheme or
    mixer; then ``compiled``, the words of FASTER and ``bfloat16`` if they apply."""

    case: str
    shape: str
    variant: str
    device: str
    threads: int
    repeats: int  # timed calls of a turn; 0: the process ends after its first call
    profile: bool = False  # whether to measure kernels
    bandwidth: float = 0.0  # of the memory of a GPU in bytes per second; 0: unknown

    @property
    def is_theirs(self) -> bool:
        return self.variant.startswith("transformers")

    @property
    def is_compiled(self) -> bool:
        return "compiled" in self.variant

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

    def our_settings(self, *more: str) -> RunSettings:
        words = [*self.sizes.words.split(), *more]
        scheme = self.variant.split()[0]
        if scheme in MIXERS:
            words += [f"configs/mixer/{scheme}.yaml", "model.kv_heads=null"]
        elif scheme in SCHEMES:
            words.append(f"model.position.name={scheme}")
        if scheme == "learned":
            words.append(f"model.position.max_length={4 * SCHEME_LENGTH}")
        words += [FASTER[word] for word in self.variant.split() if word in FASTER]
        return load_settings(RunSettings, words)

    def our_model(self) -> Transformer:
        model = Transformer(self.our_settings().model, self.sizes.vocab, self.sizes.length)
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
    """What is timed.

    Attributes:
        call: returns the numbers that must agree between variants.
        tokens: of a call.
        first: the part of a call up to its first token, in generation.
        steps: of a call after `first`.
        ideal: seconds of a step at the peak of a GPU; in generation those in which its memory reads
            the weights and the cache. 0: unknown.
        ideal_compute: the same by the FLOPs of generation.
    """

    call: Callable[[], list[float]]
    tokens: int
    first: Callable[[], object] | None = None
    steps: int = 1
    ideal: float = 0.0
    ideal_compute: float = 0.0


def train(
    work: Workload, rows: int | None = None, length: int | None = None, parts: int = 1
) -> Task:
    """A training step of `parts` micro-batches: forward and backward passes and fused AdamW.
    Numbers: the loss."""
    rows = rows or work.sizes.batch
    length = length or work.sizes.length
    tokens = work.tokens(parts * rows, length + 1)
    inputs = tokens[:, :-1].contiguous().split(rows)
    targets = tokens[:, 1:].contiguous().split(rows)
    count = parts * rows * length
    if not work.is_theirs and not work.variant.startswith("llama"):
        return our_training(work, rows, length, inputs, targets)
    if work.is_theirs:
        model = work.their_model().train()
        forward = torch.compile(model) if work.is_compiled else model

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return forward(x, labels=y, shift_labels=y, use_cache=False).loss
    else:
        model = work.our_model().train()
        plain = torch.compile(plain_llama) if work.is_compiled else plain_llama

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return plain(model, x, y)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> list[float]:
        total = torch.zeros((), device=tokens.device)
        for x, y in zip(inputs, targets, strict=True):
            with work.autocast():
                value = loss(x, y) / parts
            value.backward()
            total += value.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [float(total)]

    return Task(step, count, ideal=ideal_training(work, length, count))


def our_training(
    work: Workload, rows: int, length: int, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> Task:
    """The step of train.py, without clipping."""
    parts = len(inputs)
    settings = work.our_settings(
        f"train_length={length}",
        f"training.batch_size={parts * rows}",
        f"training.micro_batch_size={rows}",
        f"training.compile={str(work.is_compiled).lower()}",
        "training.grad_clip=null",
    )
    t = settings.training
    parallel = Parallel(t)
    parallel.autocast_dtype = torch.bfloat16 if work.is_half else None
    model = work.our_model().train()
    state = TrainState.create(model, settings, parallel)
    positions = TokenPositions.plain(length, device=parallel.device)
    micro = [MicroBatch(x, y, positions) for x, y in zip(inputs, targets, strict=True)]
    count = parts * rows * length
    batch = StepBatch(TrainingSchedule(settings).stages[0], micro, count)
    requests = StopRequests()

    def step() -> list[float]:
        return [train_step(state, batch, parallel, t, requests).read()["loss"]]

    return Task(step, count, ideal=ideal_training(work, length, count))


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
    new = work.sizes.new
    dtype = torch.bfloat16 if work.is_half else torch.float32
    ideal = ideal_compute = 0.0
    if work.is_theirs:
        theirs = work.their_model().to(dtype)
        mask = torch.ones_like(ids)

        def generate(count: int) -> Tensor:
            out = theirs.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
            return out[:, PROMPT:]

        def logits(row: Tensor) -> Tensor:
            return theirs(row[None]).logits[0]
    else:
        ours = pack(work.our_model().to(dtype))
        if work.device != "cpu":
            numbers = sum(x.numel() for x in ours.parameters()) - ours.embed.weight.numel()
            numbers += rows * ours.cached_numbers(PROMPT + new // 2)  # on average
            ideal = numbers * dtype.itemsize / work.bandwidth if work.bandwidth else 0.0
            flops = rows * ours.flops_per_token(PROMPT + new) / 3  # of the forward pass
            ideal_compute = flops / peak_flops(ids.device)

        def generate(count: int) -> Tensor:
            sampling = SamplingParams(temperature=0)
            steps = Generation(ours, ids.tolist(), new, sampling, is_compiled=work.is_compiled)
            return torch.tensor(list(islice(steps, count)), device=ids.device).T

        def logits(row: Tensor) -> Tensor:
            return ours(row[None], TokenPositions.plain(len(row), device=row.device))[0]

    if not work.is_half:
        check_greedy(logits, ids, generate(new))
    return Task(
        lambda: generate(new).flatten().tolist(),
        rows * new,
        lambda: generate(1).tolist(),
        new - 1,
        ideal,
        ideal_compute,
    )


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


def ideal_training(work: Workload, length: int, tokens: int) -> float:
    """Seconds of a training step at the peak of the device."""
    model = meta_model(work.our_settings(), work.sizes.vocab)
    return tokens * model.flops_per_token(length) / peak_flops(torch.device(work.device))


def peak_flops(device: torch.device) -> float:
    """FLOP/s of the data sheet in bfloat16, else those of a product of large matrices, on a CPU in
    float32."""
    if peak := known_peak(device):
        return peak
    is_gpu = device.type == "cuda"
    n = 8192 if is_gpu else 1024  # saturates the device
    x = torch.ones(n, n, dtype=torch.bfloat16 if is_gpu else torch.float32, device=device)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        _ = x @ x
        if is_gpu:
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


@cache
def bandwidth_alone(device: str) -> float:
    """`bandwidth` in a process of its own; 0 if it fails."""
    command = [sys.executable, __file__, "--bandwidth", device]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else 0.0


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


def scheme_train(work: Workload) -> Task:
    rows = 1 if work.device == "cpu" else 4
    return train(work, rows, min(SCHEME_LENGTH, 8 * work.sizes.length))


CASES: dict[str, Callable[[Workload], Task]] = {
    "train": train,
    "train-8": lambda work: train(work, parts=ACCUMULATED),
    "prefill": prefill,
    "decode-1": lambda work: decode(work, 1),
    "decode-8": lambda work: decode(work, 8),
    "decode-64": lambda work: decode(work, 64),
    "fixed-targets": fixed_targets,
    "long-train": lambda work: train(work, 1, LONG_LENGTH),
    "scheme-train": scheme_train,
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
        if case.startswith("train"):
            names += ["ours compiled", "llama compiled", "transformers compiled"]
        if is_cpu:
            yield "transformers", names
        if not is_cpu or (case.startswith("train") and has_bfloat16(torch.device("cpu"))):
            yield "transformers bfloat16", [f"{name} bfloat16" for name in names]


def measure(work: Workload) -> None:
    """Run a workload in this process: prints a line of JSON when it is warm, one for each line of
    standard input, and one after the last."""
    is_cpu = work.device == "cpu"
    prepare_cpu(work.threads if is_cpu else THREADS_ON_GPU)
    if is_cpu and work.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    task = CASES[work.case](work)
    if not is_cpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    checked = task.call()
    first_call = time.perf_counter() - start
    if work.repeats:
        task.call()
    facts = {name: getattr(task, name) for name in ("tokens", "steps", "ideal", "ideal_compute")}
    report(checked=checked, first_call=first_call, **facts)
    for _ in sys.stdin:
        calls = [timed(task.call) for _ in range(work.repeats)]
        firsts = [timed(task.first) for _ in calls] if task.first else []
        report(calls=calls, firsts=firsts, peak=peak_memory(torch.device(work.device)))
    report(kernels=kernels(task, work.device) if work.profile else [])


def kernels(task: Task, device: str) -> list[dict]:
    """Kernels of a step, on a CPU its operations, from the longest: name, number and time in ms. In
    generation they are the mean over its tokens, with the prompt."""
    profiled = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    calls, steps = (1, task.steps + 1) if task.first else (PROFILED, 1)
    with profile(activities=[profiled], acc_events=True) as seen:
        for _ in range(calls):
            task.call()
    field = f"self_{'cpu' if device == 'cpu' else 'device'}_time_total"
    found = [
        {
            "kernel": event.key[:120],
            "calls": event.count / calls / steps,
            "ms": getattr(event, field) / calls / steps / 1000,
        }
        for event in seen.key_averages()
    ]
    return sorted((x for x in found if x["ms"]), key=lambda x: -x["ms"])


def report(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of CPU time and of wall time. `call` waits for its results."""
    cpu = time.process_time()
    wall = time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


class MeasuredProcess:
    """A workload in a process of its own, which waits for its turns.

    Raises TrainingError, with the last line of its errors, where the process has ended.
    """

    def __init__(self, work: Workload):
        self.work = work
        self.facts: dict = {}  # known when it is warm
        self.turns: list[dict] = []
        self.kernels: list[dict] = []
        self._is_killed = False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--workload", json.dumps(asdict(work))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(work.threads)},
            cwd=ROOT,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout

    def kill(self) -> None:
        """End it, with the processes that compile for it and share its output."""
        if self._process.poll() is None:
            self._is_killed = True
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()
        self._errors.close()

    def warm_up(self) -> None:
        """Wait until the process can be timed."""
        self.facts = self._answer()

    def turn(self) -> None:
        """Time its calls."""
        with suppress(BrokenPipeError):
            self._stdin.write("\n")
            self._stdin.flush()
        self.turns.append(self._answer())

    def end(self) -> None:
        """Measure its kernels and end it."""
        self._stdin.close()
        self.kernels = self._answer()["kernels"]
        self._process.wait()

    def _answer(self) -> dict:
        for line in self._stdout:
            if line.startswith("{"):
                return json.loads(line)
        status = self._process.wait()
        last = "ended for lack of time"
        if not self._is_killed:
            self._errors.seek(0)
            errors = self._errors.read().strip()
            print(errors, file=sys.stderr)
            last = (errors.splitlines() or [f"ended with status {status}"])[-1]
        raise TrainingError(last)


class Comparison(NamedTuple):
    """Rows of variants and of their kernels, and the errors of variants by name."""

    rows: list[dict]
    kernels: list[dict]
    errors: dict[str, str]


def compare(works: Sequence[Workload], rounds: int, seconds: float | None = None) -> Comparison:
    """Time variants in turns; the first one is the baseline.

    Args:
        seconds: after this time the turns so far count; after WARM_SHARE of it, variants that are
            not warm are ended, so that the others have turns.
    """
    processes: list[MeasuredProcess] = []
    errors: dict[str, str] = {}

    def attempt(process: MeasuredProcess, act: Callable[[MeasuredProcess], None]) -> None:
        if process.work.variant not in errors:
            try:
                act(process)
            except TrainingError as error:
                errors[process.work.variant] = str(error)

    def end(only_cold: bool) -> None:
        for process in processes:
            if not (only_cold and process.facts):
                process.kill()

    timers = []
    if seconds is not None:
        timers.append(threading.Timer(WARM_SHARE * seconds, end, [True]))
        timers.append(threading.Timer(seconds, end, [False]))
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        if works[0].device != "cpu" and "decode" in works[0].case:
            # before others use the memory
            works = [replace(work, bandwidth=bandwidth_alone(work.device)) for work in works]
        for work in works:
            processes.append(MeasuredProcess(work))
            if work.device == "cpu" and work.threads == 1:  # on one core
                attempt(processes[-1], MeasuredProcess.warm_up)
        for process in processes:
            if not process.facts:
                attempt(process, MeasuredProcess.warm_up)
        for _ in range(rounds):
            for process in processes:
                attempt(process, MeasuredProcess.turn)
        for process in processes:
            attempt(process, MeasuredProcess.end)
    finally:
        for timer in timers:
            timer.cancel()
        for process in processes:
            process.close()
    timed = [process for process in processes if process.turns]
    baseline = timed[0] if timed and timed[0].work == works[0] else None
    found = Comparison([], [], errors)
    for process in timed:
        try:
            found.rows.append(row_of(process, baseline, works[0].variant))
        except TrainingError as error:
            errors[process.work.variant] = str(error)
            continue
        total = sum(kernel["ms"] for kernel in process.kernels)
        names = {name: getattr(process.work, name) for name in KEYS[:3]}
        for kernel in process.kernels[:KERNELS]:
            found.kernels.append({**names, **kernel, "share": kernel["ms"] / total})
    return found


def seconds_of(process: MeasuredProcess, name: str) -> list[float]:
    """Of all turns: CPU time of one thread, else wall time."""
    is_cpu_time = process.work.device == "cpu" and process.work.threads == 1
    return [pair[0 if is_cpu_time else 1] for turn in process.turns for pair in turn[name]]


def row_of(process: MeasuredProcess, baseline: MeasuredProcess | None, name: str) -> dict:
    """The result of a variant, compared with the baseline, whose name is `name`."""
    work = process.work
    facts = process.facts
    times = seconds_of(process, "calls")
    firsts = seconds_of(process, "firsts")
    median = statistics.median(times)
    first = statistics.median(firsts) if firsts else 0.0
    step = (median - first) / facts["steps"]
    pairs = [pair for turn in process.turns for pair in turn["calls"]]
    ratio = ratio_of_fastest = checked = None
    if baseline is not None:
        reference = seconds_of(baseline, "calls")
        more = facts["tokens"] / baseline.facts["tokens"]
        ratio = more * statistics.median(reference) / median
        ratio_of_fastest = more * min(reference) / min(times)
        checked = agreement(work, baseline.facts["checked"], facts["checked"])
    return {
        "case": work.case,
        "shape": work.shape,
        "variant": work.variant,
        "threads": work.threads,
        "baseline": name,
        "tokens_per_second": facts["tokens"] / median,
        "ratio": ratio,
        "ratio_of_fastest": ratio_of_fastest,
        "busy": sum(cpu for cpu, _ in pairs) / sum(wall for _, wall in pairs) / work.threads,
        "of_the_peak": facts["ideal"] / step or None,
        "samples": len(times),
        "peak_mib": max(turn["peak"] for turn in process.turns) / 2**20,
        "checked": checked,
        "date": time.strftime("%Y-%m-%d"),
        "ms": 1000 * step,
        "first_token_ms": 1000 * first or None,
        "mfu": facts["ideal_compute"] / step or None,
        "kernels_ms": sum(kernel["ms"] for kernel in process.kernels) or None,
        "first_call_s": facts["first_call"],
    }


def agreement(work: Workload, baseline: list[float], other: list[float]) -> str:
    """How well the checked numbers agree. Raises TrainingError if they do not."""
    if not baseline or work.case.startswith(("scheme", "long")):
        return ""
    pairs = list(zip(baseline, other, strict=True))
    if work.case.startswith("decode"):
        return f"{sum(a == b for a, b in pairs) / len(pairs):.1%} of tokens equal"
    largest = max(abs(a - b) for a, b in pairs)
    if not largest <= LARGEST_DIFFERENCE["bfloat16" if work.is_half else "float32"]:
        raise TrainingError(f"results differ by {largest:.2g}")
    return f"difference {largest:.1e}"


def save(rows: Sequence[dict], file: Path, machine: str) -> None:
    """Add rows to a CSV file, in place of earlier ones of their kind, and write its page."""
    table = joined(rows, file, KEYS)
    # Results of earlier versions have further cases.
    order = {name: i for i, name in enumerate(dict.fromkeys([*CASES, *table["case"]]))}
    table = table.sort_values(
        ["shape", "case"],
        key=lambda column: column.map(order) if column.name == "case" else column,
        kind="stable",
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, table.to_csv(index=False))
    write_page(file, machine)


def joined(rows: Sequence[dict], file: Path, keys: Sequence[str]) -> pd.DataFrame:
    """The rows of a CSV file and new ones, which replace those with equal keys."""
    new = pd.DataFrame(
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        for row in rows
    )
    if not file.exists():
        return new
    known = pd.read_csv(file, keep_default_na=False)
    kinds = set(new[keys].itertuples(index=False, name=None))
    kept = [kind not in kinds for kind in known[keys].itertuples(index=False, name=None)]
    return pd.DataFrame(pd.concat([known[kept].astype(object), new.astype(object)]))


def save_kernels(rows: Sequence[dict], file: Path) -> None:
    """Add the kernels of variants to a CSV file, in place of earlier ones."""
    if rows:
        table = joined(rows, file, KEYS[:3])
        write_text(file, table.to_csv(index=False))


def write_page(file: Path, machine: str) -> None:
    """The page beside a CSV file of results."""
    columns = {  # titles and formats
        "tokens_per_second": ("tokens/s", "{:,.0f}"),
        "ratio": ("ratio", "{:.2f}"),
        "ratio_of_fastest": ("of the fastest", "{:.2f}"),
        "busy": ("busy", "{:.2f}"),
        "of_the_peak": ("of the peak", "{:.0%}"),
        "peak_mib": ("peak, MiB", "{:,.0f}"),
        "ms": ("ms", "{:.3g}"),
        "first_token_ms": ("first token, ms", "{:.3g}"),
        "mfu": ("MFU", "{:.1%}"),
        "kernels_ms": ("kernels, ms", "{:.3g}"),
        "first_call_s": ("first call, s", "{:.1f}"),
    }
    table = pd.read_csv(file, keep_default_na=False)
    for name in set(columns) & set(table):
        table[name] = [x if x == "" else columns[name][1].format(float(x)) for x in table[name]]
    empty = [name for name in table.columns if set(table[name]) == {""}]
    table = table.drop(columns=["threads", *empty])
    table = table.rename(columns={name: title for name, (title, _) in columns.items()})
    head = HEAD.format(machine=machine, torch=torch.__version__)
    rows = markdown_table(list(table.columns), table.to_numpy().tolist())
    write_text(file.with_suffix(".md"), f"{head}{rows}\n")


def results_of(device: torch.device, folder: Path) -> tuple[Path, str]:
    """The file for the results of a device, and the name of the machine."""
    if device.type != "cuda":
        return folder / "cpu.csv", f"{os.cpu_count()} cores of {processor()}"
    machine = torch.cuda.get_device_name(device)
    return folder / "gpu" / f"{re.sub('[^a-z0-9]+', '-', machine.lower())}.csv", machine


def compare_and_save(
    works: Sequence[Workload],
    rounds: int,
    console: Console,
    file: Path,
    machine: str,
    seconds: float | None = None,
    first_calls: Mapping[str, float | None] = {},
) -> Comparison:
    """`compare`, whose rows are written to `file` and printed; errors are warnings. `first_calls`:
    seconds by variant, of those compiled before; None: unknown."""
    found = compare(works, rounds, seconds)
    for row in found.rows:
        row["first_call_s"] = first_calls.get(row["variant"], row["first_call_s"])
    if found.rows:
        save(found.rows, file, machine)
        save_kernels(found.kernels, file.with_name(f"{file.stem}_kernels.csv"))
    for row in found.rows:
        ratio = "" if row["ratio"] is None else f"ratio {row['ratio']:.2f}, "
        console.info(
            f"{row['case']} {row['shape']} {row['variant']}: {row['tokens_per_second']:,.0f} "
            f"tokens/s, {row['ms']:.3g} ms, {ratio}{row['checked'] or 'not compared'}"
        )
    for variant, error in found.errors.items():
        console.warn(f"{works[0].case} {works[0].shape} {variant}: {error}")
    return found


def main() -> int:
    if sys.argv[1:2] == ["--bandwidth"]:
        print(bandwidth(torch.device(sys.argv[2])))
        return 0
    if sys.argv[1:2] == ["--workload"]:
        measure(Workload(**json.loads(sys.argv[2])))
        return 0
    known = [*SCHEMES, *MIXERS]
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", default=["A", "B"], choices=SHAPES)
    short = [case for case in CASES if case != "train-8"]
    add("--cases", nargs="+", default=short, choices=CASES, metavar="CASE")
    add("--schemes", nargs="+", default=known, choices=known, metavar="SCHEME")
    add("--device", default="cpu", help="cpu (the default) or cuda")
    add("--threads", type=int, default=1, help="of each process (default: 1)")
    add("--rounds", type=int, default=3, help="turns of each variant (default: 3)")
    add("--repeats", type=int, default=5, help="timed calls of a turn (default: 5)")
    add("--results", type=Path, default=ROOT / "docs" / "benchmarks", help="folder")
    options = parser.parse_args()
    for name in ("threads", "rounds", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name}: must be at least 1")
    device = find_device(options.device)
    file, machine = results_of(device, options.results)
    console = Console()
    failures = 0
    for case in options.cases:
        for shape in options.shapes:
            for baseline, variants in comparisons(case, device.type, options.schemes):
                names = [baseline, *variants]
                works = [
                    Workload(
                        case,
                        shape,
                        name,
                        str(device),
                        options.threads,
                        options.repeats,
                        profile=device.type == "cuda",
                    )
                    for name in names
                ]
                found = compare_and_save(works, options.rounds, console, file, machine)
                failures += len(found.errors)
    return int(failures > 0)


if __name__ == "__main__":
    run_main(main)
