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
BATCH = 48  # bytes per token: int64 tokens and targets of this batch, the next, and one in transfer
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
    # of a whole step over all devices; on a CPU they share memory with the model
    step_sequences: int = 0
    context: int = 1  # devices that share each sequence


def memory(model: Transformer, length: int, layout: MemoryLayout) -> dict[str, float]:
    """Bytes on each device, by purpose, for training on windows of `length` tokens."""
    p = model.parameter_count()
    size = layout.float_bytes
    split = layout.world if layout.sharded else 1
    tokens = layout.sequences * length / layout.context
    needed = {
        "weights": size * p / split,
        "gradients": size * p / split,
        "moments": 2 * size * p / split,
        "mean": size * p / split if layout.mean else 0.0,
    }
    if layout.sharded and layout.world > 1:
        # The current block and the next, one block's gradients in both dtypes; embedding and head
        # throughout.
        block = block_parameters(model)
        outer = p - block * model.settings.layers
        low = HALF if layout.half else size
        needed["whole blocks"] = (2 * low + low + size) * block + (2 * low + size) * outer
    else:
        needed["bfloat16 copies"] = HALF * matrices(model) if layout.half else 0.0
        needed["buckets"] = size * p if layout.world > 1 else 0.0
    needed["activations"] = tokens * activations(model, length, layout)
    if layout.context > 1:
        needed["gathered keys"] = layout.sequences * gathered_keys(model, length, layout)
    needed["logits"] = logits(model, tokens, layout.device)
    needed["batches"] = (
        BATCH * layout.step_sequences * length / layout.world if layout.device == "cpu" else 0.0
    )
    return needed


def block_parameters(model: Transformer) -> int:
    """The number of parameters of one layer."""
    count = sum(p.numel() for block in model.layers for p in block.parameters())
    return count // model.settings.layers


def matrices(model: Transformer) -> int:
    """The number of parameters used in matrix products: all except the embedding."""
    return block_parameters(model) * model.settings.layers + model.vocab_size * model.settings.dim


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
    if layout.checkpointing == "none":
        return sum(whole)
    return stored + max(whole)


def gathered_keys(model: Transformer, length: int, layout: MemoryLayout) -> float:
    """Bytes per sequence of keys and values that are gathered from other devices and saved for the
    backward pass: those visible to its two chunks, less the device's own L/N. That is L − L/2N
    tokens; in layers with a window and without sinks, those before each chunk that are visible to
    it, and while they are gathered the L/2 tokens of one pass. With checkpointing, of one layer at
    a time. Layers with a state gather it instead, which is small."""
    numbers = [0.0]
    dropped = 0.0  # of one pass of a layer with a window
    for block in model.layers:
        mixer = block.mixer
        scheme = mixer.position.settings
        tokens = length * (1 - 1 / (2 * layout.context))
        if scheme.window is not None and not scheme.sinks:
            tokens = min(tokens, 2 * (scheme.window - 1))
            dropped = length / 2 * 2 * mixer.kv_heads * mixer.head_dim
        if mixer.has_attention_weights:
            numbers.append(tokens * 2 * mixer.kv_heads * mixer.head_dim)
    size = HALF if layout.half else layout.float_bytes
    kept = max(numbers) if layout.checkpointing != "none" else sum(numbers)
    return size * (kept + dropped)


def logits(model: Transformer, tokens: float, device: str) -> float:
    """Bytes of the head's logits: three float32 copies of the rows that are computed at once."""
    rows = min(LOGITS_AT_ONCE.get(device, 1 << 25) // model.vocab_size + 1, tokens)
    return 3.0 * rows * model.vocab_size * FLOAT


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
    model = meta_model(settings, vocabulary_of(settings, parent))
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
        step_sequences=most,
        context=t.parallel.context,
    )


def vocabulary_of(settings: RunSettings, parent: ParentRun | None) -> int:
    return parent.about["vocab_size"] if parent else expected_vocabulary(settings.data)


def fixes_for(model: Transformer, settings: RunSettings, layout: MemoryLayout, free: float) -> str:
    """Suggest settings, not yet in use, that reduce memory."""
    fixes = []
    smaller = [1 << power for power in reversed(range(layout.sequences.bit_length()))]
    for sequences in smaller:
        needed = memory(model, settings.train_length, replace(layout, sequences=sequences))
        if sum(needed.values()) <= USED * free:
            fixes.append(
                f"set training.micro_batch_size={sequences} (now {layout.sequences} per device)"
            )
            break
    if memory(model, settings.train_length, layout)["batches"] > USED * free:
        fixes.append(f"lower training.batch_size (now {layout.step_sequences})")
    if layout.checkpointing != "full":
        fixes.append("set training.parallel.activation_checkpointing=true")
    if not layout.sharded:
        fixes.append(
            "split the weights over several devices (training.parallel.sharding=full, "
            "docs/scaling.md)"
        )
    return ", or ".join([*fixes, "take more devices" if layout.sharded else "take a smaller model"])


def size_text(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
