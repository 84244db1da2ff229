"""The workloads of scripts/benchmark.py: training, scoring and generation by Sextant, transformers
and a plain LLaMA, on the same random weights and tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evaluation.scoring.text_loss import ModelScorer
from generation.decoding import Generation
from generation.sampling import SamplingParams
from interop.export.native import choose_class, weights
from interop.extras import load_extra
from model import SCHEMES, TokenPositions, Transformer
from model.decoding import pack
from run_directory.position_overrides import meta_model
from run_directory.precision import has_bfloat16
from run_directory.run_settings import RunSettings
from run_directory.training_schedule import TrainingSchedule
from scripts.plain_llama import plain_llama
from settings.load import load_settings
from train import train_step
from training.micro_batches import MicroBatch, StepBatch
from training.parallel import Parallel
from training.stop_requests import StopRequests
from training.train_state import TrainState

MIXERS = ["deltanet", "gated_deltanet", "gla", "kda", "linear", "mamba2", "retnet"]
PREFILL = 2048
PROMPT = 32
WINDOWS = 4  # windows of fixed targets
TARGETS = 64
SCHEME_LENGTH = 2048
LONG_LENGTH = 16_384
ACCUMULATED = 8  # number of micro-batches of train-8
NEAR_TIE = 1e-3  # difference of logits whose order rounding may swap
# words of a variant, and the overrides that they add
FASTER = {
    "residual": "training.residual_dtype=autocast",
    "graphs": "training.cuda_graphs=true",
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its training step; `words`: arguments of train.py."""

    words: str
    vocab: int
    length: int
    batch: int
    new: int = 128  # number of generated tokens per row


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
    """The workload of one process. `variant`: ``ours``, ``transformers``, ``llama``, or a scheme or
    mixer; then ``compiled``, the words of FASTER and ``bfloat16`` if they apply."""

    case: str
    shape: str
    variant: str
    device: str
    threads: int
    repeats: int  # timed calls per turn; 0: the process ends after its first call
    profile: bool = False  # whether to measure kernels

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.shape, self.variant

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
    def is_decoding(self) -> bool:
        return "decode" in self.case

    @property
    def has_cpu_time(self) -> bool:
        """Whether the CPU time of the process is measured, not the wall time."""
        return self.device == "cpu" and self.threads == 1

    @property
    def weights_dtype(self) -> torch.dtype:
        """Weights are bfloat16 in generation only; other cases use autocast."""
        return torch.bfloat16 if self.is_half and self.is_decoding else torch.float32

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]

    def tokens(self, rows: int, count: int) -> Tensor:
        """(rows, count) random token ids."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.sizes.vocab, (rows, count), generator=generator).to(self.device)

    def autocast(self) -> AbstractContextManager:
        if not self.is_half or self.is_decoding:
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
        return model.initialize(0).eval().to(self.device, self.weights_dtype)

    def their_model(self) -> Any:
        """transformers' Llama with its SDPA attention and the weights of `our_model`."""
        transformers = load_extra("transformers")
        ours = self.our_model()
        choice = choose_class(ours)
        config = transformers.LlamaConfig(
            **{**choice.config, "max_position_embeddings": 1 << 18},
            attn_implementation="sdpa",
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        theirs = transformers.LlamaForCausalLM(config).eval()
        theirs.load_state_dict(weights(ours, ours.state_dict(), choice))
        return theirs.to(self.device, self.weights_dtype)


class Ours:
    """Passes of our decoder without gradients."""

    def __init__(self, work: Workload):
        self.model = work.our_model()
        self.work = work
        self.scorer = ModelScorer(self.model, device=work.device)
        if work.is_decoding:
            pack(self.model)

    def logits(self, ids: Tensor) -> Tensor:
        """The logits (B, T, V) of all tokens."""
        return self.model(ids, TokenPositions.plain(ids.shape[1], device=ids.device))

    def prefill(self, ids: Tensor) -> Tensor:
        """The logits (B, 1, V) after a prompt that goes through an empty cache."""
        rows, length = ids.shape
        positions = TokenPositions.plain(length, device=ids.device)
        return self.model(ids, positions, cache=self.model.make_cache(rows, length), keep=1)

    def generate(self, prompts: Tensor, count: int) -> Tensor:
        """(B, count) greedy tokens."""
        steps = Generation(
            self.model,
            prompts.tolist(),
            self.work.sizes.new,
            SamplingParams(temperature=0),
            is_compiled=self.work.is_compiled,
        )
        return torch.tensor(list(islice(steps, count)), device=prompts.device).T

    def nll(self, window: Tensor) -> float:
        """Mean NLL of the last TARGETS tokens of (1, T)."""
        return float(np.mean(self.scorer(window.cpu().numpy(), TARGETS)))


class Theirs:
    """The same passes of transformers' Llama."""

    def __init__(self, work: Workload):
        self.model = work.their_model()

    def logits(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits

    def prefill(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=True, logits_to_keep=1).logits

    def generate(self, prompts: Tensor, count: int) -> Tensor:
        mask = torch.ones_like(prompts)
        out = self.model.generate(
            prompts, attention_mask=mask, max_new_tokens=count, do_sample=False
        )
        return out[:, prompts.shape[1] :]

    @torch.no_grad()
    def nll(self, window: Tensor) -> float:
        out = self.model(window[:, :-1], logits_to_keep=TARGETS, use_cache=False)
        return float(F.cross_entropy(out.logits[0].float(), window[0, -TARGETS:]))


def passes(work: Workload) -> Ours | Theirs:
    return Theirs(work) if work.is_theirs else Ours(work)


@dataclass(frozen=True)
class Task:
    """The calls that are timed.

    Attributes:
        call: returns the numbers that must agree between variants.
        tokens: number of tokens of a call.
        first: the part of a call up to its first token, in generation.
        steps: number of steps of a call after `first`.
        amount: FLOPs of a step in training, bytes that a step reads in generation, else 0.
    """

    call: Callable[[], list[float]]
    tokens: int
    first: Callable[[], object] | None = None
    steps: int = 1
    amount: float = 0.0


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
    is_plain = work.is_theirs or work.variant.startswith("llama")
    step = (plain_step if is_plain else our_step)(work, inputs, targets)
    count = parts * rows * length
    model = meta_model(work.our_settings(), work.sizes.vocab)
    return Task(step, count, amount=count * model.flops_per_token(length))


def plain_step(
    work: Workload, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> Callable[[], list[float]]:
    """The step of transformers or of the plain LLaMA."""
    model: Any = (work.their_model() if work.is_theirs else work.our_model()).train()
    plain: Any = model if work.is_theirs else plain_llama
    forward = torch.compile(plain, disable=not work.is_compiled)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        if work.is_theirs:
            return forward(x, labels=y, shift_labels=y, use_cache=False).loss
        return forward(model, x, y)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> list[float]:
        total = 0.0
        for x, y in zip(inputs, targets, strict=True):
            with work.autocast():
                value = loss(x, y) / len(inputs)
            value.backward()
            total += value.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [float(total)]

    return step


def our_step(
    work: Workload, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> Callable[[], list[float]]:
    """The step of train.py, without clipping."""
    rows, length = inputs[0].shape
    settings = work.our_settings(
        f"train_length={length}",
        f"training.batch_size={len(inputs) * rows}",
        f"training.micro_batch_size={rows}",
        f"training.compile={str(work.is_compiled).lower()}",
        "training.grad_clip=null",
    )
    parallel = Parallel(settings.training)
    parallel.autocast_dtype = torch.bfloat16 if work.is_half else None
    state = TrainState.create(work.our_model().train(), settings, parallel)
    positions = TokenPositions.plain(length, device=parallel.device)
    micro = [MicroBatch(x, y, positions) for x, y in zip(inputs, targets, strict=True)]
    stage = TrainingSchedule(settings).stages[0]
    batch = StepBatch(stage, micro, len(inputs) * rows * length)
    requests = StopRequests()
    return lambda: [train_step(state, batch, parallel, settings.training, requests).read()["loss"]]


def scheme_train(work: Workload) -> Task:
    rows = 1 if work.device == "cpu" else 4
    return train(work, rows, min(SCHEME_LENGTH, 8 * work.sizes.length))


def prefill(work: Workload) -> Task:
    """A prompt through an empty cache, with the logits of its last token."""
    ids = work.tokens(1, PREFILL)
    model = passes(work)

    def call() -> list[float]:
        with torch.inference_mode(), work.autocast():
            return model.prefill(ids).flatten()[:: work.sizes.vocab // 64].tolist()

    return Task(call, PREFILL)


def decode(work: Workload, rows: int = 1) -> Task:
    """Greedy generation after a short prompt, which is part of the time. Numbers: the tokens."""
    prompts = work.tokens(rows, PROMPT)
    new = work.sizes.new
    model = passes(work)
    if not work.is_half:
        check_greedy(model.logits, prompts, model.generate(prompts, new))
    sizes = meta_model(work.our_settings(), work.sizes.vocab)
    numbers = sum(x.numel() for x in sizes.parameters()) - sizes.embed.weight.numel()
    numbers += rows * sizes.cached_numbers(PROMPT + new // 2)  # on average
    return Task(
        call=lambda: model.generate(prompts, new).flatten().tolist(),
        tokens=rows * new,
        first=lambda: model.generate(prompts, 1).tolist(),
        steps=new - 1,
        amount=numbers * work.weights_dtype.itemsize,
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
        out = logits(torch.cat([prompt, row[:-1]])[None])[0, -len(row) :]
        short = float((out.amax(-1) - out.gather(-1, row[:, None])[:, 0]).max())
        if short > NEAR_TIE:
            raise ValueError(f"a generated token has a logit {short:.2g} below the largest one")


def fixed_targets(work: Workload) -> Task:
    """The last TARGETS targets of windows of PREFILL tokens. Numbers: their mean NLL."""
    windows = work.tokens(WINDOWS, PREFILL + 1)
    model = passes(work)

    def call() -> list[float]:
        with work.autocast():
            return [sum(model.nll(window[None]) for window in windows) / WINDOWS]

    return Task(call, WINDOWS * PREFILL)


CASES: dict[str, Callable[[Workload], Task]] = {
    "train": train,
    "train-8": lambda work: train(work, parts=ACCUMULATED),
    "prefill": prefill,
    "decode-1": decode,
    "decode-8": lambda work: decode(work, 8),
    "decode-64": lambda work: decode(work, 64),
    "fixed-targets": fixed_targets,
    "long-train": lambda work: train(work, 1, LONG_LENGTH),
    "scheme-train": scheme_train,
    "scheme-decode": decode,
}


def comparisons(case: str, device: str, schemes: Sequence[str]) -> Iterator[list[str]]:
    """Variants that are measured in turns; the first is the baseline."""
    is_cpu = device == "cpu"
    if case.startswith(("scheme", "long")):
        names = schemes if case.startswith("scheme") else ["gated_deltanet"]
        on_gpu = " bfloat16" if case == "scheme-decode" else " compiled bfloat16"
        precision = "" if is_cpu else on_gpu
        for name in names:
            if name != "rope":
                yield [f"rope{precision}", f"{name}{precision}"]
    else:
        names = ["transformers", "ours"]
        if case.startswith("train"):
            names += ["ours compiled", "llama compiled", "transformers compiled"]
        if is_cpu:
            yield names
        if not is_cpu or (case.startswith("train") and has_bfloat16(torch.device("cpu"))):
            yield [f"{name} bfloat16" for name in names]
