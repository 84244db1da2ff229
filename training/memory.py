"""What training holds on each device, by what it is for: the formulas of docs/scaling.md."""

from dataclasses import dataclass

from model import LinearMixer, Transformer
from model.transformer import LOGITS_AT_ONCE

FLOAT, HALF = 4, 2  # bytes


@dataclass(frozen=True)
class Layout:
    """How a run lies on its devices."""

    world: int
    sharded: bool  # FSDP2, else DDP
    sequences: int  # of one pass on one device
    checkpointing: bool = False
    half: bool = True  # bfloat16 autocast
    device: str = "cuda"
    mean: bool = False  # of the weights, kept beside them
    float_bytes: int = FLOAT  # of a number that is not halved: 8 in float64


def memory(model: Transformer, length: int, layout: Layout) -> dict[str, float]:
    """Bytes on each device by what they hold, in training on windows of `length` tokens."""
    p, size = model.parameter_count(), layout.float_bytes
    split = layout.world if layout.sharded else 1
    tokens = layout.sequences * length
    found = {
        "weights": size * p / split,
        "gradients": size * p / split,
        "moments": 2 * size * p / split,
        "mean": size * p / split if layout.mean else 0.0,
    }
    if layout.sharded and layout.world > 1:
        # The block at work and the next one, a block's gradients in both types, embedding and head all along.
        block, outer = block_parameters(model), p - block_parameters(model) * model.settings.layers
        low = HALF if layout.half else size
        found["whole blocks"] = (2 * low + low + size) * block + (2 * low + size) * outer
    else:
        found["bfloat16 copies"] = HALF * matrices(model) if layout.half else 0.0
        found["buckets"] = size * p if layout.world > 1 else 0.0
    found["activations"] = tokens * activations(model, length, layout)
    found["logits"] = logits(model, tokens, layout.device)
    return found


def block_parameters(model: Transformer) -> int:
    """Parameters of one layer."""
    return sum(p.numel() for p in model.layers.parameters()) // model.settings.layers


def matrices(model: Transformer) -> int:
    """Parameters that are multiplied with: all but the embedding."""
    return block_parameters(model) * model.settings.layers + model.vocab_size * model.settings.dim


def activations(model: Transformer, length: int, layout: Layout) -> float:
    """Bytes a token that the backward pass finds. Of a block: what goes into its two norms, before and
    after it is scaled, and sums of norms and softmax, in float32; what comes out of the norms, q, k, v,
    what attention makes of them in two orders, and four vectors of the feed-forward. With checkpointing:
    the input of every block, and all of one block."""
    s, size = model.settings, layout.float_bytes
    inner = 2 * s.dim + (3 * s.heads + 2 * s.kv_heads) * s.features + 4 * s.mlp_width
    if isinstance(s.mixer, LinearMixer):  # forms of q and k, weights within a chunk, sums between chunks
        chunk = min(s.mixer.chunk, length)
        inner += 4 * (s.heads + s.kv_heads) * s.features + s.heads * chunk
        inner += 2 * s.kv_heads * s.features**2 // chunk
    one = (4 * s.dim + s.heads + 2) * size + inner * (HALF if layout.half else size)
    return s.layers * s.dim * size + one if layout.checkpointing else s.layers * one


def logits(model: Transformer, tokens: int, device: str) -> float:
    """Bytes of the head's logits, of as many rows as are worked on at once: thrice in float32."""
    rows = min(LOGITS_AT_ONCE.get(device, 1 << 25) // model.vocab_size + 1, tokens)
    return 3.0 * rows * model.vocab_size * FLOAT
