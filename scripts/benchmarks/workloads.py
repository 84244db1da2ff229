"""The workloads of scripts/benchmark.py, here and in transformers, on equal random weights and
tokens. litgpt_peer.py has those of litgpt."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from evaluation.scoring.scoring import ModelScorer
from generation.decoding import Generation
from generation.sampling import SamplingParams
from interop.extras import load_extra
from interop.huggingface.weight_names import LLAMA, weight_map
from model import ModelSettings, TokenPositions, Transformer
from model.devices import prepare_cpu
from run_directory.optimizer_settings import AdamWSettings
from training.hardware import peak_memory
from training.optim.optimizer import make_optimizer

# sliding evaluation, in tokens
WINDOW = 2048
STRIDE = 512
SCORED = 6144
FIXED_WINDOWS = 4
FIXED_TARGETS = 64
PREFILL = 2048
PROMPT = 32
NEW = {1: 128, 8: 128, 64: 32}  # new tokens by batch size
LONG = 2048  # tokens of a training step of the comparison of schemes
NEAR_TIE = 1e-3  # logits that rounding may swap


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its training step."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab: int
    length: int
    batch: int

    def settings(self, scheme: str) -> ModelSettings:
        position: dict[str, Any] = {"name": scheme}
        if scheme == "learned":
            position["max_length"] = 4 * LONG
        return ModelSettings.model_validate(
            {
                "layers": self.layers,
                "dim": self.dim,
                "heads": self.heads,
                "kv_heads": self.kv_heads,
                "ffn_dim": self.ffn_dim,
                "position": position,
            }
        )


SHAPES = {
    "A": Shape(4, 256, 8, 4, 688, 4096, 512, 8),
    "B": Shape(6, 288, 6, 6, 768, 32000, 256, 8),
}


@dataclass(frozen=True)
class Workload:
    """What one process measures.

    Attributes:
        shape: a name of SHAPES, or a name and changed sizes: ``A length=2048 batch=1``.
        variant: ``ours``, ``ours compiled``, ``transformers`` or ``transformers compiled``; for the
            cases of SCHEME_CASES the name of a scheme.
        warmup: calls that are not timed.
    """

    shape: str
    case: str
    variant: str
    threads: int = 1
    repeats: int = 5
    warmup: int = 2


def shape_of(text: str) -> Shape:
    """The sizes that `Workload.shape` names."""
    name, *changes = text.split()
    known = {field.name for field in fields(Shape)}
    sizes = {key: int(value) for key, value in (change.split("=") for change in changes)}
    assert set(sizes) <= known
    return replace(SHAPES[name], **sizes)


@dataclass(frozen=True)
class Sample:
    """One timed repetition: CPU seconds of the process over its threads, and wall time."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Measured:
    """The result of one process.

    Attributes:
        tokens: tokens processed by one repetition.
        checked: numbers that must agree between variants: a loss, logits, or generated tokens.
        peak: peak memory in bytes.
    """

    samples: list[Sample]
    tokens: int
    checked: list[float]
    peak: int


# (function to time, number of tokens); the function returns the numbers to compare
Prepared = tuple[Callable[[], list[float]], int]


def our_model(shape: Shape, scheme: str = "rope") -> Transformer:
    return Transformer(shape.settings(scheme), shape.vocab, shape.length).initialize(0).eval()


def their_model(shape: Shape) -> Any:
    """transformers' Llama with the weights of `our_model`."""
    transformers = load_extra("transformers")
    ours = our_model(shape)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=1 << 18,
        rms_norm_eps=ours.settings.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    own = ours.state_dict()
    names, _ = weight_map([LLAMA] * shape.layers, own)
    theirs.load_state_dict(
        {name: torch.cat([own[part] for part in parts]) for name, parts in names.items()}
    )
    return theirs


def tokens_of(shape: Shape, rows: int, count: int) -> Tensor:
    """(rows, count) random token ids."""
    return torch.randint(
        0,
        shape.vocab,
        (rows, count),
        generator=torch.Generator().manual_seed(1),
    )


def litgpt_request(workload: Workload, folder: Path) -> dict[str, Any]:
    """What litgpt_peer.py runs: sizes, tokens, and a file with the weights of `our_model`."""
    shape = shape_of(workload.shape)
    file = folder / f"weights-{workload.shape}.safetensors"
    if not file.exists():
        save_file(
            {name: x.contiguous() for name, x in their_model(shape).state_dict().items()}, file
        )
    rows, count = {"train": (shape.batch, shape.length + 1), "prefill": (1, PREFILL)}.get(
        workload.case, (1, PROMPT)
    )
    sizes = asdict(shape) | {"block_size": 4 * LONG, "norm_eps": shape.settings("rope").norm_eps}
    tokens = tokens_of(shape, rows, count).tolist()
    return asdict(workload) | {
        "shape": sizes,
        "weights": str(file),
        "tokens": tokens,
        "new": NEW[1],
    }


def train(shape: Shape, variant: str) -> Prepared:
    """A training step: forward and backward pass and fused AdamW. Numbers: the loss."""
    return _training_step(shape, "rope", variant, shape.batch, shape.length)


def _training_step(
    shape: Shape,
    scheme: str,
    variant: str,
    rows: int,
    length: int,
) -> Prepared:
    tokens = tokens_of(shape, rows, length + 1)
    inputs = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].contiguous()
    if "transformers" in variant:
        theirs = their_model(shape).train()
        optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3, fused=True)
        model = torch.compile(theirs) if "compiled" in variant else theirs

        def loss() -> Tensor:
            return model(
                inputs,
                labels=targets,
                shift_labels=targets,
                use_cache=False,
            ).loss
    else:
        ours = our_model(shape, scheme).train()
        optimizer = make_optimizer(ours, AdamWSettings(lr=1e-3))
        if "compiled" in variant:
            ours.compile(dynamic=True)

        def loss() -> Tensor:
            nll = ours(
                inputs,
                TokenPositions.plain(length),
                targets,
                reduction="sum",
            )
            return nll / targets.numel()

    def step() -> list[float]:
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [float(value.detach())]

    return step, tokens[:, 1:].numel()


def prefill(shape: Shape, variant: str) -> Prepared:
    """A prompt through an empty cache, with the logits of its last token."""
    ids = tokens_of(shape, 1, PREFILL)
    if variant == "transformers":
        theirs = their_model(shape)

        def run() -> Tensor:
            return theirs(ids, use_cache=True, logits_to_keep=1).logits
    else:
        ours = our_model(shape)

        def run() -> Tensor:
            return ours(
                ids, TokenPositions.plain(PREFILL), cache=ours.make_cache(1, PREFILL), keep=1
            )

    def call() -> list[float]:
        with torch.inference_mode():
            return run().flatten()[:: shape.vocab // 64].tolist()

    return call, PREFILL


def decode(shape: Shape, variant: str, rows: int) -> Prepared:
    """Greedy generation after a short prompt, which is part of the time. Numbers: the tokens."""
    ids = tokens_of(shape, rows, PROMPT)
    new = NEW[rows]
    if variant == "transformers":
        theirs = their_model(shape)
        mask = torch.ones_like(ids)

        def call() -> list[float]:
            out = theirs.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                do_sample=False,
            )
            return out[:, PROMPT:].flatten().tolist()

        def logits(row: Tensor) -> Tensor:
            return theirs(row[None]).logits[0]
    else:
        ours = our_model(shape, "rope" if variant == "ours" else variant).pack()
        prompts = ids.tolist()

        def call() -> list[float]:
            steps = list(Generation(ours, prompts, new, SamplingParams(temperature=0)))
            return [float(token or 0) for row in zip(*steps, strict=True) for token in row]

        def logits(row: Tensor) -> Tensor:
            return ours(row[None], TokenPositions.plain(len(row)))[0]

    check_greedy(logits, ids, torch.tensor(call()).long().view(rows, new))
    return call, rows * new


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


def sliding(shape: Shape, variant: str) -> Prepared:
    """Windows of WINDOW tokens that advance by STRIDE; the recipe of transformers' documentation.
    Numbers: the mean NLL of all targets."""
    ids = tokens_of(shape, 1, SCORED + 1)
    if variant == "transformers":
        theirs = their_model(shape)

        def call() -> list[float]:
            total = 0.0
            previous = 0
            for begin in range(0, SCORED, STRIDE):
                end = min(begin + WINDOW, SCORED)
                window = ids[:, begin : end + 1]
                labels = window.clone()
                labels[:, : -(end - previous)] = -100
                with torch.no_grad():
                    total += float(theirs(window, labels=labels).loss) * (end - previous)
                previous = end
                if end == SCORED:
                    break
            return [total / SCORED]
    else:
        scorer = ModelScorer(our_model(shape))
        array = ids.numpy()

        def call() -> list[float]:
            total = float(scorer(array[:, : WINDOW + 1], WINDOW).sum())
            for end in range(WINDOW + STRIDE, SCORED + 1, STRIDE):
                total += float(scorer(array[:, end - WINDOW : end + 1], STRIDE).sum())
            return [total / SCORED]

    return call, SCORED


def fixed_targets(
    shape: Shape, variant: str, windows: int = FIXED_WINDOWS, length: int = WINDOW
) -> Prepared:
    """The last FIXED_TARGETS targets of windows of WINDOW tokens. Numbers: their mean NLL."""
    ids = tokens_of(shape, windows, length + 1)
    if variant == "transformers":
        theirs = their_model(shape)

        def nll(window: Tensor) -> float:
            with torch.no_grad():
                logits = theirs(
                    window[:, :-1], logits_to_keep=FIXED_TARGETS, use_cache=False
                ).logits
            return float(F.cross_entropy(logits[0].float(), window[0, -FIXED_TARGETS:]))
    else:
        scorer = ModelScorer(our_model(shape))

        def nll(window: Tensor) -> float:
            return float(np.mean(scorer(window.numpy(), FIXED_TARGETS)))

    def call() -> list[float]:
        return [sum(nll(window[None]) for window in ids) / windows]

    return call, windows * length


CASES: dict[str, Callable[[Shape, str], Prepared]] = {
    "train": train,
    "prefill": prefill,
    "decode-1": lambda shape, variant: decode(shape, variant, 1),
    "decode-8": lambda shape, variant: decode(shape, variant, 8),
    "decode-64": lambda shape, variant: decode(shape, variant, 64),
    "sliding": sliding,
    "fixed-targets": fixed_targets,
}


def one_window(shape: Shape, variant: str) -> Prepared:
    """The last FIXED_TARGETS targets of one window of the shape's length. Numbers: their mean
    NLL."""
    return fixed_targets(shape, variant, windows=1, length=shape.length)


GROWTH_CASES: dict[str, Callable[[Shape, str], Prepared]] = {
    "growth-train": train,
    "growth-score": one_window,
}
# Here `variant` is the name of a scheme.
SCHEME_CASES: dict[str, Callable[[Shape, str], Prepared]] = {
    "scheme-train": lambda shape, variant: _training_step(shape, variant, "ours", 1, LONG),
    "scheme-decode": lambda shape, variant: decode(shape, variant, 1),
}


def measure(workload: Workload) -> Measured:
    """Time a workload in this process after two calls for warm-up."""
    prepare_cpu(workload.threads)
    if hasattr(os, "sched_setaffinity") and workload.threads == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    case = {**CASES, **SCHEME_CASES, **GROWTH_CASES}[workload.case]
    call, tokens = case(shape_of(workload.shape), workload.variant)
    checked = [call() for _ in range(workload.warmup)][:1]
    samples = []
    for _ in range(workload.repeats):
        cpu = time.process_time()
        wall = time.perf_counter()
        checked.append(call())
        samples.append(Sample(time.process_time() - cpu, time.perf_counter() - wall))
    return Measured(
        samples,
        tokens,
        checked[0],
        peak_memory(torch.device("cpu")),
    )
