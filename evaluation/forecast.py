"""Memory and time, told before they are spent; and the batch size that fits."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evaluation.errors import EvaluationError
from evaluation.protocols import Windows
from evaluation.scoring import ModelScorer
from model import LinearMixer, Places, Transformer
from model.block import Attention
from model.kernels import choose, query_block

# Blocks of scores that exist at once: measured as resident memory, the largest of each kind of kernel.
BLOCKS = {"masked": 4, "views": 6, "weighed": 14}
SLACK = 1.25  # the allocator's
LONG_TRIAL = 1.0  # seconds; a trial that takes longer is not repeated
HEAD_FLOATS = 1 << 23  # logits that exist at once; more are made in chunks
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 65_536}  # per batch: a CPU gains nothing from more, a GPU does


def memory_needed(model: Transformer, length: int, keep: int, batch: int, chunk: int) -> int:
    """Peak bytes of one batch of windows beside the weights: an upper estimate.

    Activations of one chunk, the cache where there is more than one chunk, blocks of queries × L of scores as
    far as the model's kernels spell them out, and logits of the kept outputs.
    """
    s = model.settings
    element = model.embed.weight.element_size()
    tokens = min(length, chunk)
    width = 6 * s.dim + 3 * s.mlp_width + 3 * (s.heads + 2 * s.kv_heads) * s.features
    activations = batch * tokens * width * max(4, element)
    cache = model.remembered_per_token * length * batch * element if length > chunk else 0
    if isinstance(s.mixer, LinearMixer):  # pairs and sums of all chunks at once; the sums alone are cached
        pairs = min(s.mixer.chunk, tokens)
        sums = batch * s.kv_heads * (s.features + 1) ** 2 * max(4, element)
        cache = s.layers * sums if length > chunk else 0
        scores = 2 * batch * s.heads * tokens * pairs * max(4, element)
        scores += 2 * (tokens // pairs + 2) * sums
    else:
        queries, blocks = min(tokens, query_block(batch * s.heads, length)), blocks_at_once(model)
        # Beside the blocks keys and values are repeated for every head; masks by distance are but vectors.
        per_key = blocks * queries + (2 * s.features if blocks else 0) + 8
        scores = batch * s.heads * length * per_key * max(4, element)
    logits = 3 * min(batch * min(keep, tokens) * model.vocab_size, HEAD_FLOATS) * max(4, element)
    return int(SLACK * (activations + cache + scores + logits))


@torch.no_grad()
def blocks_at_once(model: Transformer) -> int:
    """Blocks of scores (B, H, t, S) that exist at once in the layers' kernels: found by asking what each
    would do with a pass of two tokens."""
    device, found = model.embed.weight.device, [0]

    def look(attention: Attention, args: tuple[Any, ...]) -> None:
        x, span, plan = args[:3]
        bound = plan.bind(x, None)
        views = bound.read(attention.queries(span.of_queries(x)), bound.write(attention.keys(x)))
        kernel = choose(views, bound.sink, device.type)
        if views[0].weigh is not None:
            found.append(BLOCKS["weighed"])
        elif kernel == "explicit":
            found.append(BLOCKS["views"])
        elif device.type == "cpu" and views[0].q.shape[-1] != model.settings.features:
            found.append(BLOCKS["masked"])  # the fused kernel wants values as wide as keys
        elif kernel == "blocks" and not views[0].pairs.is_by_distance:
            found.append(BLOCKS["masked"])

    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        model(torch.zeros(1, 2, dtype=torch.long, device=device), Places.plain(2, device=device))
    finally:
        for hook in hooks:
            hook.remove()
    return max(found)


def memory_free(device: torch.device) -> int:
    """Bytes that can still be taken: of the GPU, or of the machine and the container it runs in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # not Linux, or no control group: the first figure stands
    return free


def choose_batch(model: Transformer, length: int, keep: int, *, chunk: int, device, budget: int) -> int:
    """Windows at once. Raises EvaluationError, with the length that would fit, where not even one fits."""
    tokens = TOKENS_AT_ONCE.get(torch.device(device).type, TOKENS_AT_ONCE["cpu"])
    batch = max(1, tokens // length)
    while batch > 1 and memory_needed(model, length, keep, batch, chunk) > budget:
        batch //= 2
    if memory_needed(model, length, keep, batch, chunk) > budget:
        low, high = 0, length
        while high - low > 1:
            middle = (low + high) // 2
            fits = memory_needed(model, middle, min(keep, middle), 1, chunk) <= budget
            low, high = (middle, high) if fits else (low, middle)
        need = memory_needed(model, length, keep, 1, chunk) / 2**30
        raise EvaluationError(
            f"length {length} needs about {need:.2f} GiB and {budget / 2**30:.2f} GiB may be used; "
            f"length {low} would fit (or a smaller chunk, now {chunk})"
        )
    return batch


@dataclass(frozen=True)
class Pace:
    """Seconds of one window of L inputs: linear·L + square·L²."""

    linear: float
    square: float

    def seconds(self, windows: Windows) -> float:
        inputs = windows.inputs.astype(float)
        return float((self.linear * inputs + self.square * inputs**2).sum())


def measure_pace(scorer: ModelScorer, model: Transformer, short: int, long: int, keep: int) -> Pace:
    """Time one short and one longer window of this model: at most two chunks, or 8192 tokens, so that where
    there will be chunks they are timed as well."""
    long = min(long, 2 * scorer.chunk, 8192, model.limit or long)

    def timed(length: int) -> float:
        windows = np.zeros((1, length + 1), dtype=np.int64)
        best, left = float("inf"), 3
        while left:
            start = time.perf_counter()
            scorer(windows, min(keep, length))
            took = time.perf_counter() - start
            best, left = min(best, took), 0 if took > LONG_TRIAL else left - 1
        return best

    at_short = timed(short)
    if long <= short:
        return Pace(at_short / short, 0.0)
    at_long = timed(long)
    square = max(0.0, (at_long / long - at_short / short) / (long - short))
    return Pace(max(0.0, at_long / long - square * long), square)
