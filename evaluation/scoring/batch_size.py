"""Estimates of memory before an evaluation starts, and the batch size that fits."""

from bisect import bisect_left
from typing import Any

import torch

from errors import EvaluationError
from model import TokenPositions, Transformer
from model.attention.kernels import choose
from model.attention.mask import AttentionView, Normalizer

# Number of blocks of scores in memory at once, from measured resident memory: the largest value for
# each kind of kernel.
BLOCKS = {"masked": 5, "views": 6, "weighed": 14}
SLACK = 1.25  # for the allocator
HEAD_FLOATS = 1 << 23  # maximum number of logits in memory at once; more are computed in chunks
# tokens per batch: larger batches are faster on a GPU, not on a CPU
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 65_536}


def memory_needed(
    model: Transformer,
    length: int,
    keep: int,
    batch: int,
    chunk: int,
    context: int = 1,
) -> int:
    """Upper estimate of the peak bytes of one batch of windows, without the weights.

    Sums the activations of one chunk, the KV cache (with more than one chunk), the blocks of
    queries × L scores that the model's kernels materialize, and the logits of the kept outputs.
    Each of `context` processes that share windows stores the hidden states of its tokens and the
    keys of one layer instead of the cache.
    """
    s = model.settings
    element = model.embed.weight.element_size()
    computed = max(4, element)  # bytes per number in computations
    tokens = min(length, chunk)
    if context > 1:
        tokens = min(-(-length // (2 * context)), chunk)
    heads = max((kind.heads + 2 * kind.kv_heads) * kind.head_dim for kind in model.kinds.values())
    width = 6 * s.dim + 3 * s.ffn_dim + 3 * heads
    activations = batch * tokens * width
    blocks = blocks_at_once(model)
    scores = max(block.mixer.workspace(batch, tokens, length, blocks) for block in model.layers)
    logits = 3 * min(batch * min(keep, tokens) * model.vocab_size, HEAD_FLOATS)
    cached = 0
    if context > 1:
        # hidden states that a pass reads and returns
        hidden = 2 * -(-length // context) * s.dim
        cached = batch * (hidden + gathered_numbers(model, length, context * tokens))
    elif length > chunk:
        cached = batch * model.cached_numbers(length)
    return int(SLACK * (computed * (activations + scores + logits) + element * cached))


def gathered_numbers(model: Transformer, length: int, chunk: int) -> int:
    """Numbers in keys and values per row of the layer that gathers most, in passes of `chunk`
    tokens. With a window, the tokens that a pass sees count twice: as received and as joined."""
    most = 0
    for block, name in zip(model.layers, model.layer_schemes, strict=True):
        scheme = model.kinds[model.kind_of[name]].position
        if block.mixer.has_attention_weights:
            seen = length
            if scheme.window is not None:
                seen = min(length, 2 * (scheme.window + scheme.sinks + chunk))
            features = model.position[name].key_features
            most = max(most, block.mixer.cached_numbers(seen, features))
    return most


@torch.no_grad()
def blocks_at_once(model: Transformer) -> int:
    """Number of blocks of scores (B, H, t, S) in memory at once in the layers' kernels, found from
    a pass of two tokens."""
    device = model.embed.weight.device
    blocks = [0]

    def inspect(
        views: list[AttentionView],
        v: Any,
        scale: float,
        normalizer: Normalizer,
        out: Any,
    ) -> None:
        kernel = choose(views, v, normalizer, device.type)
        (first, *_) = views
        if first.weights_fn is not None:
            blocks.append(BLOCKS["weighed"])
        elif kernel == "explicit":
            blocks.append(BLOCKS["views"])
        elif device.type == "cpu" and first.q.shape[-1] != v.shape[-1]:
            blocks.append(BLOCKS["masked"])  # the fused kernel requires values as wide as keys
        elif kernel in ("merged", "biased", "blocks") and not first.mask.is_by_distance:
            blocks.append(BLOCKS["masked"])

    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    model(
        tokens,
        TokenPositions.plain(2, device=device),
        hooks=[inspect if b.mixer.has_attention_weights else None for b in model.layers],
    )
    return max(blocks)


def choose_batch(
    model: Transformer,
    length: int,
    keep: int,
    *,
    chunk: int,
    budget: int,
    context: int = 1,
) -> int:
    """The batch size in windows. Raises EvaluationError, with a length that would fit, if a single
    window does not fit."""

    def fits(batch: int, length: int = length) -> bool:
        return memory_needed(model, length, min(keep, length), batch, chunk, context) <= budget

    device = model.embed.weight.device.type
    at_once = TOKENS_AT_ONCE.get(device, TOKENS_AT_ONCE["cpu"])
    batch = max(1, at_once // length)
    while not fits(batch):
        if batch == 1:
            longer = bisect_left(range(length), True, lo=1, key=lambda n: not fits(1, n))
            shorter = longer - 1
            need = memory_needed(model, length, keep, 1, chunk, context) / 2**30
            raise EvaluationError(
                f"length {length} needs about {need:.2f} GiB and {budget / 2**30:.2f} GiB may be "
                f"used; length {shorter} would fit, or set a smaller chunk (now {chunk})"
            )
        batch //= 2
    return batch
