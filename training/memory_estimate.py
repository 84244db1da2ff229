"""Memory of training on each device, by purpose; docs/scaling.md has the formulas."""

from dataclasses import dataclass, replace

from data import expected_vocabulary
from errors import TrainingError
from model import Transformer
from model.block import Checkpointing
from model.devices import free_memory
from model.loss import LOGITS_AT_ONCE
from run_directory.parent_run import ParentRun
from run_directory.position_overrides import meta_model
from run_directory.run_settings import RunSettings
from training.parallel import Parallel

# bytes
FLOAT = 4
HALF = 2
USED = 0.9  # share of the free memory that suggested sizes may use


@dataclass(frozen=True)
class MemoryLayout:
    """How a run is distributed over its devices."""

    world: int
    sharded: bool  # FSDP2, else DDP
    sequences: int  # per forward pass and device
    checkpointing: Checkpointing = "none"
    half: bool = True  # bfloat16 autocast
    device: str = "cuda"
    mean: bool = False  # whether an EMA of the weights is stored
    float_bytes: int = FLOAT  # bytes of a number outside autocast; 8 in float64
    context: int = 1  # devices that share each sequence


def memory(model: Transformer, length: int, layout: MemoryLayout) -> dict[str, float]:
    """Bytes on each device, by purpose, for training on windows of `length` tokens."""
    p = model.parameter_count()
    s = model.settings
    size = layout.float_bytes
    state = size * p / (layout.world if layout.sharded else 1)
    low = HALF if layout.half else size
    blocks = sum(weight.numel() for weight in model.layers.parameters())
    tokens = layout.sequences * length / layout.context
    needed = {
        "weights": state,
        "gradients": state,
        "moments": 2 * state,
        "mean": state if layout.mean else 0.0,
    }
    if layout.sharded and layout.world > 1:
        # The current block and the next, one block's gradients in both dtypes; embedding and head
        # throughout.
        outer = p - blocks
        needed["whole blocks"] = (3 * low + size) * blocks / s.layers + (2 * low + size) * outer
    else:
        # of all weights in matrix products: the embedding is in none
        copies = HALF * (blocks + model.vocab_size * s.dim)
        needed["bfloat16 copies"] = copies if layout.half else 0.0
        needed["buckets"] = size * p if layout.world > 1 else 0.0
    needed["activations"] = tokens * activations(model, length, layout)
    needed["gathered keys"] = layout.sequences * gathered_keys(model, length, layout)
    # three float32 copies of the rows of logits that are computed at once
    most = LOGITS_AT_ONCE.get(layout.device, 1 << 25) // model.vocab_size + 1
    needed["logits"] = 3.0 * min(most, tokens) * model.vocab_size * FLOAT
    return needed


def activations(model: Transformer, length: int, layout: MemoryLayout) -> float:
    """Bytes per token saved for the backward pass.

    Per block: the inputs of its norms, before and after scaling, and the statistics of norms
    and softmax, in float32; the outputs of the norms, what the mixer saves, and four vectors of the
    feed-forward. With full checkpointing: the input of every block, and everything of one block.
    With selective checkpointing also the outputs of attention and of all matrix products of every
    block.
    """
    s = model.settings
    size = layout.float_bytes
    low = HALF if layout.half else size
    whole = []
    stored = 0.0
    for block in model.layers:
        mixer = block.mixer
        norms = 4 if block.norm_placement == "both" else 2
        inner = norms * s.dim + mixer.saved_numbers(length) + 4 * s.ffn_dim
        whole.append((2 * norms * s.dim + mixer.heads + norms) * size + inner * low)
        stored += s.dim * size
        if layout.checkpointing == "selective":
            products = 2 * (mixer.heads + mixer.kv_heads) * mixer.head_dim
            stored += (products + 2 * s.dim + 2 * s.ffn_dim) * low + mixer.heads * size
    return sum(whole) if layout.checkpointing == "none" else stored + max(whole)


def gathered_keys(model: Transformer, length: int, layout: MemoryLayout) -> float:
    """Bytes per sequence of keys and values that are gathered from other devices and saved for the
    backward pass: those visible to its two chunks, less the device's own L/N. That is L − L/2N
    tokens; in layers with a window and without sinks, those before each chunk that are visible to
    it. With checkpointing, of one layer at a time. Layers with a state gather it instead, which is
    small."""
    if layout.context == 1:
        return 0.0
    numbers = [0.0]
    for block in model.layers:
        mixer = block.mixer
        scheme = mixer.position.settings
        pairs = 2 * mixer.kv_heads * mixer.head_dim
        tokens = length * (1 - 1 / (2 * layout.context))
        if scheme.window is not None and not scheme.sinks:
            tokens = min(tokens, 2 * (scheme.window - 1))
        if mixer.has_attention_weights:
            numbers.append(tokens * pairs)
    size = HALF if layout.half else layout.float_bytes
    return size * (max(numbers) if layout.checkpointing != "none" else sum(numbers))


def check_memory(
    settings: RunSettings, parallel: Parallel, parent: ParentRun | None = None
) -> None:
    """Raise TrainingError for a run that needs more than the free memory of its devices, before
    training. Every process must call it."""
    model, layout = model_and_layout(settings, parallel, parent)
    needed = sum(memory(model, settings.train_length, layout).values())
    free = min(parallel.gather(free_memory(parallel.device)))
    if needed > free:
        raise TrainingError(
            f"this will not fit: about {size_text(needed)} are needed on each device, "
            f"{size_text(free)} are free; {fixes_for(model, settings, layout, free)}, or pass "
            "--force to train anyway"
        )


def model_and_layout(
    settings: RunSettings, parallel: Parallel, parent: ParentRun | None
) -> tuple[Transformer, MemoryLayout]:
    """The model of a run on the meta device, and its layout on the devices."""
    t = settings.training
    vocabulary = parent.about["vocab_size"] if parent else expected_vocabulary(settings.data)
    model = meta_model(settings, vocabulary)
    most = max(-(-p.batch_size * p.length // settings.train_length) for p in settings.plan)
    return model, MemoryLayout(
        world=parallel.world,
        sharded=parallel.sharded,
        sequences=min(t.micro_batch_size or most, -(-most // parallel.data_world)),
        checkpointing=t.parallel.checkpointing,
        half=parallel.autocast_dtype is not None,
        device=parallel.device_type,
        mean=t.ema is not None,
        float_bytes=8 if t.precision == "float64" else FLOAT,
        context=t.parallel.context,
    )


def fixes_for(model: Transformer, settings: RunSettings, layout: MemoryLayout, free: float) -> str:
    """Suggest settings, not yet in use, that reduce memory."""
    fixes = []
    for power in reversed(range(layout.sequences.bit_length())):
        size = 1 << power
        needed = memory(model, settings.train_length, replace(layout, sequences=size))
        if sum(needed.values()) <= USED * free:
            fixes.append(
                f"set training.micro_batch_size={size} (now {layout.sequences} per device)"
            )
            break
    if layout.checkpointing != "full":
        fixes.append("set training.parallel.activation_checkpointing=true")
    if layout.sharded:
        fixes.append("take more devices")
    else:
        fixes.append(
            "split the weights over several devices (training.parallel.sharding=full, "
            "docs/scaling.md), or take a smaller model"
        )
    return ", or ".join(fixes)


def size_text(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
