"""Memory of training on each device, by purpose; docs/scaling.md has the formulas."""

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
DOUBLE = 8
FLOAT = 4
HALF = 2
BATCH = 48  # per token: int64 tokens and targets of this batch, the next, and one in transfer


class MemoryEstimate:
    """Memory of a run on each device. The constructor gathers the free memory of all devices: every
    process must call it.

    Attributes:
        model: the run's model, on the meta device.
        sequences: number of sequences of train_length per forward pass and device.
        parts: bytes by purpose; `needed`: the sum of all parts.
        free: free bytes on the device that has the fewest.
    """

    def __init__(self, settings: RunSettings, parallel: Parallel, parent: ParentRun | None):
        vocabulary = parent.manifest["vocab_size"] if parent else expected_vocabulary(settings.data)
        self._settings = settings
        self.model = meta_model(settings, vocabulary)
        most = windows_of_a_step(settings)
        own = -(-most // parallel.data_world)
        self.sequences = min(settings.training.micro_batch_size or most, own)
        self.parts = memory(self.model, settings, parallel, self.sequences)
        self.needed = sum(self.parts.values())
        self.free = min(parallel.gather(free_memory(parallel.device)))

    @property
    def fixes(self) -> str:
        """Settings that reduce memory."""
        batch_size = self._settings.training.batch_size
        return (
            f"lower training.micro_batch_size (now {self.sequences} per device) or "
            f"training.batch_size (now {batch_size}), set "
            "training.parallel.activation_checkpointing=true, or shard the weights over several "
            "devices (training.parallel.sharding=full)"
        )

    def check(self) -> None:
        """Raise TrainingError if the run needs more memory than is free."""
        if self.needed > self.free:
            raise TrainingError(
                f"this will not fit: about {size_text(self.needed)} are needed on each device, "
                f"{size_text(self.free)} are free; {self.fixes}, or pass --force to train anyway"
            )


def memory(
    model: Transformer, settings: RunSettings, parallel: Parallel, sequences: int
) -> dict[str, float]:
    """Bytes on each device, by purpose, with `sequences` of train_length per forward pass."""
    t = settings.training
    s = model.settings
    length = settings.train_length
    checkpointing = t.parallel.checkpointing
    context = t.parallel.context
    p = model.parameter_count()
    blocks = sum(weight.numel() for block in model.layers for weight in block.parameters())
    size = DOUBLE if t.precision == "float64" else FLOAT
    low = size if parallel.autocast_dtype is None else HALF  # bytes of a number in matrix products
    state = size * p / (parallel.world if parallel.sharded else 1)
    needed = {
        "weights": state,
        "gradients": state,
        "moments": 2 * state,
        "mean": state if t.ema is not None else 0.0,
    }
    if parallel.sharded and parallel.world > 1:
        # The current block and the next, one block's gradients in both dtypes; embedding and head
        # throughout.
        outer = p - blocks
        needed["whole blocks"] = (3 * low + size) * blocks / s.layers + (2 * low + size) * outer
    else:
        # copies of all weights in matrix products; the embedding is in none
        copies = HALF * (blocks + model.vocab_size * s.dim)
        needed["half-precision copies"] = copies if low == HALF else 0.0
        needed["buckets"] = size * p if parallel.world > 1 else 0.0
    tokens = sequences * length / context
    compiled = parallel.device_type == "cuda" if t.compile is None else t.compile
    stream = low if t.residual_dtype == "autocast" else size
    stored = tokens * activations(model, length, checkpointing, size, low, compiled, stream)
    needed["activations"] = stored
    has_parts = windows_of_a_step(settings) > sequences * parallel.data_world
    if not has_parts and not t.cuda_graphs:
        # Without accumulation, gradients take the place of activations.
        needed["gradients"] = max(0.0, state - stored)
    if context > 1:
        gathered = gathered_keys(model, length, checkpointing, context)
        needed["gathered keys"] = sequences * low * gathered
    if parallel.device_type == "cpu":  # the batches share its memory with the model
        needed["batches"] = BATCH * length * windows_of_a_step(settings) / parallel.world
    # three float32 copies of the rows of logits that are computed at once
    most = LOGITS_AT_ONCE.get(parallel.device_type, 1 << 25) // model.vocab_size + 1
    needed["logits"] = 3.0 * min(most, tokens) * model.vocab_size * FLOAT
    return needed


def windows_of_a_step(settings: RunSettings) -> int:
    """The number of windows of train_length, rounded up, that have as many tokens as the largest
    step, on all devices together."""
    return max(-(-p.batch_size * p.length // settings.train_length) for p in settings.plan)


def activations(
    model: Transformer,
    length: int,
    checkpointing: Checkpointing,
    size: int,
    low: int,
    compiled: bool = False,
    stream: int | None = None,
) -> float:
    """Bytes per token saved for the backward pass.

    Per block: the inputs of its norms, before and after scaling, and the statistics of norms and
    softmax, in float32; the outputs of the norms, what the mixer saves, four vectors of the
    feed-forward, and inputs and outputs of Canon layers. With full checkpointing: the input of
    every block, and everything of one block. With selective checkpointing also the outputs of
    attention and of all matrix products of every block. A compiled pass recomputes the inputs of
    norms after scaling and the activation of the feed-forward.

    Args:
        size, low: bytes of a number outside and inside of autocast.
        stream: bytes of a number of the residual stream; None: `size`.
    """
    s = model.settings
    stream = stream or size
    whole = []
    stored = 0.0
    for block in model.layers:
        mixer = block.mixer
        norms = 4 if block.norm_placement == "both" else 2
        inner = norms * s.dim + mixer.saved_numbers(length) + (3 if compiled else 4) * s.ffn_dim
        inner += sum(2 * len(canon.convolution.weight) for canon in block.canons.values())
        outer = (1 if compiled else 2) * norms * s.dim * stream + (mixer.heads + norms) * size
        whole.append(outer + inner * low)
        stored += s.dim * stream
        if checkpointing == "selective":
            products = 2 * (mixer.heads + mixer.kv_heads) * mixer.head_dim
            stored += (products + 2 * s.dim + 2 * s.ffn_dim) * low + mixer.heads * size
    return sum(whole) if checkpointing == "none" else stored + max(whole)


def gathered_keys(
    model: Transformer, length: int, checkpointing: Checkpointing, context: int
) -> float:
    """Numbers per sequence in keys and values that are gathered from N = `context` devices and
    saved for the backward pass: the tokens visible to a device's two chunks, without its own L/N.
    These are L − L/2N tokens; in layers with a window and without sinks, the tokens before each
    chunk that are visible to it. With checkpointing, the numbers of one layer at a time. Layers
    with a state gather the state instead, which is small."""
    numbers = [0.0]
    for block in model.layers:
        mixer = block.mixer
        scheme = mixer.position.settings
        tokens = length * (1 - 1 / (2 * context))
        if scheme.window is not None and not scheme.sinks:
            tokens = min(tokens, 2 * (scheme.window - 1))
        if mixer.has_attention_weights:
            numbers.append(tokens * 2 * mixer.kv_heads * mixer.head_dim)
    return max(numbers) if checkpointing != "none" else sum(numbers)


def size_text(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
