"""Memory, communication and throughput of training on 1 to 512 GPUs: the tables of docs/scaling.md.

    python scripts/docs/scaling.py                print the tables
    python scripts/docs/scaling.py --write        write them into docs/scaling.md
    python scripts/docs/scaling.py --gpu a100     use other hardware

Nothing is measured. Parameters and FLOPs are those of configs/base.yaml, 1b.yaml and 7b.yaml; bandwidths and
peak rates come from data sheets; the achieved share of the peak is an assumption.
"""

import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from data.files import write_text
from evaluation.reports.results_table import markdown_table
from model import ModelSettings, Transformer
from model.block import Checkpointing
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from settings.script import Parser, run_main
from training.run.hardware import RECOMPUTED, USUAL_SHARE
from training.run.memory import FLOAT, HALF, MemoryLayout, activations
from training.run.memory import memory as memory_of

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "scaling.md"
SIZES = {"100M": "base", "1B": "1b", "7B": "7b"}
WORLDS = (1, 8, 64, 512)
# share of a GPU's memory; the rest is for the CUDA context, fragmentation and communication
USABLE = 0.9
GB = 1e9
LENGTHS = {"128k": 1 << 17, "512k": 1 << 19, "1M": 1 << 20}
CONTEXTS = (8, 16, 32, 64)
CHECKPOINTING: tuple[Checkpointing, ...] = "none", "full"


@dataclass(frozen=True)
class Gpu:
    """One GPU in a node of eight; rates in each direction."""

    name: str
    peak: float  # dense bfloat16, FLOP/s
    memory: float  # bytes
    link: float  # bytes/s to the other GPUs of its node
    network: float  # bytes/s to other nodes
    node: int = 8


GPUS = {
    "h100": Gpu(
        "H100 SXM 80 GB, NVLink 4 (450 GB/s), InfiniBand NDR (400 Gb/s)", 989e12, 80e9, 450e9, 50e9
    ),
    "h200": Gpu(
        "H200 SXM 141 GB, NVLink 4 (450 GB/s), InfiniBand NDR (400 Gb/s)",
        989e12,
        141e9,
        450e9,
        50e9,
    ),
    "a100": Gpu(
        "A100 SXM 80 GB, NVLink 3 (300 GB/s), InfiniBand HDR (200 Gb/s)", 312e12, 80e9, 300e9, 25e9
    ),
}


@dataclass(frozen=True)
class ModelShape:
    """Inputs of the formulas."""

    name: str
    settings: RunSettings

    @cached_property
    def model(self) -> Transformer:
        s = self.settings
        tokenizer = self.settings.data.tokenizer
        with torch.device("meta"):
            return Transformer(s.model, getattr(tokenizer, "vocab_size", 258), s.train_length)

    @property
    def parameters(self) -> int:
        return self.model.parameter_count()

    @property
    def flops(self) -> float:
        """Training FLOPs per token: 6 per matrix weight, and causal attention."""
        return self.model.flops_per_token(self.settings.train_length)

    def activations(self, half: bool, checkpointing: Checkpointing) -> float:
        """Bytes per token saved for the backward pass."""
        layout = MemoryLayout(1, False, 1, checkpointing, half)
        return activations(self.model, self.settings.train_length, layout)


def memory(shape: ModelShape, layout: MemoryLayout) -> dict[str, float]:
    """Bytes per GPU by kind."""
    return memory_of(shape.model, shape.settings.train_length, layout)


def passes(shape: ModelShape, layout: MemoryLayout) -> int:
    """Micro-batches per step and GPU."""
    return -(-shape.settings.training.batch_size // (layout.world * layout.sequences))


def gather_seconds(size: float, world: int, gpu: Gpu) -> float:
    """Seconds to all-gather `size` bytes, over the links within a node and over all its network cards
    between nodes."""
    inside = min(world, gpu.node)
    nodes = world / gpu.node
    between = size * (1 - 1 / nodes) / (gpu.node * gpu.network) if nodes > 1 else 0.0
    return size * (1 - 1 / inside) / gpu.link + between


def communication(shape: ModelShape, layout: MemoryLayout, gpu: Gpu) -> float:
    """Seconds per step without overlap. DDP: one all-reduce of float32 gradients. FSDP2: two all-gathers of
    bfloat16 weights and one reduce-scatter of float32 gradients per micro-batch."""
    if not layout.sharded:
        return 2 * gather_seconds(FLOAT * shape.parameters, layout.world, gpu)
    each = 2 * HALF * shape.parameters + FLOAT * shape.parameters
    return passes(shape, layout) * gather_seconds(each, layout.world, gpu)


def compute(shape: ModelShape, layout: MemoryLayout, gpu: Gpu, share: float = USUAL_SHARE) -> float:
    """Seconds per step of matrix multiplications and attention; full checkpointing repeats the forward
    third."""
    tokens = passes(shape, layout) * layout.sequences * shape.settings.train_length
    again = RECOMPUTED[layout.checkpointing]
    return again * tokens * shape.flops / (share * gpu.peak)


def best_layout(shape: ModelShape, world: int, sharded: bool, gpu: Gpu) -> MemoryLayout | None:
    """The largest micro-batch that fits, a power of two, with full checkpointing only if one sequence does
    not fit without. None if nothing fits or the batch cannot be divided among the GPUs."""
    each, rest = divmod(shape.settings.training.batch_size, world)
    if rest or each < 1:
        return None
    for checkpointing in CHECKPOINTING:
        fitting = [
            layout
            for k in range(each.bit_length())
            if each % (1 << k) == 0
            and sum(
                memory(
                    shape, layout := MemoryLayout(world, sharded, 1 << k, checkpointing)
                ).values()
            )
            <= USABLE * gpu.memory
        ]
        if fitting:
            return fitting[-1]
    return None


@cache
def shapes() -> list[ModelShape]:
    return [
        ModelShape(name, load_settings(RunSettings, [str(ROOT / "configs" / f"{config}.yaml")]))
        for name, config in SIZES.items()
    ]


def group_name(world: int, sharded: bool) -> str:
    return "1" if world == 1 else f"{world} × {'FSDP2' if sharded else 'DDP'}"


def states_table(gpu: Gpu) -> str:
    """Memory with one sequence per micro-batch."""
    rows = []
    for shape in shapes():
        for world, sharded in ((1, False), (8, False), (8, True), (64, True), (512, True)):
            parts = memory(shape, MemoryLayout(world, sharded, 1))
            states = sum(parts[key] for key in ("weights", "gradients", "moments"))
            total = sum(parts.values())
            copies = total - states - parts["activations"] - parts["logits"]
            numbers = [states, copies, parts["activations"], parts["logits"], total]
            fits = "yes" if total <= USABLE * gpu.memory else "no"
            rows.append(
                [shape.name, group_name(world, sharded), *(f"{n / GB:.1f}" for n in numbers), fits]
            )
    columns = ["size", "GPUs", "states", "copies", "activations", "logits", "total"]
    return markdown_table([*columns, f"at most {USABLE * gpu.memory / GB:.0f}"], rows)


def activations_table(gpu: Gpu) -> str:
    rows = []
    for shape in shapes():
        length = shape.settings.train_length
        kept, again = (shape.activations(True, checkpointing) for checkpointing in CHECKPOINTING)
        sizes = [
            shape.name,
            f"{shape.parameters / 1e6:,.0f}M",
            f"{length:,}",
            f"{shape.flops / GB:.2f}",
        ]
        sizes += [f"{kept / 1e6:.2f}", f"{kept * length / GB:.2f}"]
        rows.append([*sizes, f"{again / 1e6:.3f}", f"{again * length / GB:.2f}"])
    columns = ["size", "parameters", "length", "GFLOP per token", "MB per token", "GB per sequence"]
    return markdown_table([*columns, "MB with checkpointing", "GB with checkpointing"], rows)


def speed_table(gpu: Gpu) -> str:
    groups = [(1, False), *((world, sharded) for world in WORLDS[1:] for sharded in (False, True))]
    rows = [
        speed_row(shape, world, sharded, gpu) for shape in shapes() for world, sharded in groups
    ]
    columns = [
        "size",
        "GPUs",
        "micro-batches × sequences",
        "GB",
        "compute, ms",
        "communication, ms",
    ]
    return markdown_table([*columns, "k tokens/s", "MFU", "days for training.tokens"], rows)


def speed_row(shape: ModelShape, world: int, sharded: bool, gpu: Gpu) -> list[str]:
    t = shape.settings.training
    name = [shape.name, group_name(world, sharded)]
    layout = best_layout(shape, world, sharded, gpu)
    if layout is None:
        why = (
            f"{t.batch_size} sequences cannot be divided"
            if t.batch_size % world
            else "does not fit"
        )
        return [*name, why, *["–"] * 6]
    calculating = compute(shape, layout, gpu)
    sending = communication(shape, layout, gpu)
    tokens = t.batch_size * shape.settings.train_length
    slow = tokens / (calculating + sending)
    fast = tokens / max(calculating, sending)
    mfu = [rate * shape.flops / (world * gpu.peak) for rate in (slow, fast)]
    days = t.tokens / fast / 86_400
    again = ", checkpointing" if layout.checkpointing == "full" else ""
    batch = f"{passes(shape, layout)} × {layout.sequences}{again}"
    room = f"{sum(memory(shape, layout).values()) / GB:.0f}"
    times = [
        f"{1000 * calculating:,.0f}",
        f"{1000 * sending:,.0f}",
        f"{slow / 1e3:,.0f} to {fast / 1e3:,.0f}",
    ]
    share = f"{mfu[0]:.0%} to {mfu[1]:.0%}"
    return [*name, batch, room, *times, share, f"{days:{'.2g' if days < 10 else ',.0f'}}"]


def context_bytes(model: Transformer, length: int, layout: MemoryLayout) -> float:
    """Bytes of the unsharded tensors that a context group gathers or reduces for one window: keys and values
    of every layer in the forward pass, their gradients in the backward pass, and keys and values again with
    checkpointing."""
    s = model.settings
    times = 2 if layout.checkpointing == "none" else 3
    size = HALF if layout.half else layout.float_bytes
    return times * s.layers * length * 2 * s.kv_heads * s.head_dim * size


def context_table(gpu: Gpu) -> str:
    """One window shared by all GPUs, with FSDP2 and full checkpointing."""
    rows = []
    for shape in shapes():
        for name, length in LENGTHS.items():
            for world in CONTEXTS:
                layout = MemoryLayout(world, True, 1, "full", context=world)
                parts = memory_of(shape.model, length, layout)
                total = sum(parts.values())
                keys = parts["gathered keys"]
                kept = parts["activations"]
                flops = RECOMPUTED["full"] * length * shape.model.flops_per_token(length) / world
                calculating = flops / (USUAL_SHARE * gpu.peak)
                sending = gather_seconds(context_bytes(shape.model, length, layout), world, gpu)
                weights = gather_seconds((2 * HALF + FLOAT) * shape.parameters, world, gpu)
                numbers = [kept, keys, total - kept - keys, total]
                fits = "yes" if total <= USABLE * gpu.memory else "no"
                times = [f"{seconds:,.2f}" for seconds in (calculating, sending, weights)]
                rows.append(
                    [shape.name, name, world, *(f"{n / GB:.1f}" for n in numbers), fits, *times]
                )
    columns = ["size", "tokens", "GPUs", "activations", "gathered keys", "other", "total, GB"]
    columns += [f"at most {USABLE * gpu.memory / GB:.0f}", "compute, s", "keys, s", "weights, s"]
    return markdown_table(columns, rows)


@dataclass(frozen=True)
class Anchor:
    """A published throughput in tokens/s per GPU, and the model it was measured with."""

    who: str
    gpu: str
    model: dict
    length: int
    vocabulary: int
    rate: float
    checkpointing: Checkpointing = "none"


LLAMA2 = {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "ffn_dim": 11008}
LLAMA3 = {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_dim": 14336}
TINY = {"dim": 2048, "layers": 22, "heads": 32, "kv_heads": 4, "ffn_dim": 5632}
ANCHORS = (
    Anchor("TinyLlama, 1.1B, A100 40 GB", "a100", TINY, 2048, 32_000, 24_000),
    Anchor("fms-fsdp #89, 7B, H100", "h100", LLAMA2, 4096, 32_000, 9_600),
    Anchor(
        "KempnerForge, 7B, one H200, full checkpointing",
        "h200",
        LLAMA2,
        4096,
        32_000,
        10_471,
        "full",
    ),
    Anchor(
        "torchtitan, 8B, 8 H100, eager, selective checkpointing",
        "h100",
        LLAMA3,
        8192,
        128_256,
        5_762,
        "selective",
    ),
    Anchor(
        "torchtitan, 8B, 8 H100, compiled, selective checkpointing",
        "h100",
        LLAMA3,
        8192,
        128_256,
        6_667,
        "selective",
    ),
)


def anchors_table(gpu: Gpu) -> str:
    rows = []
    for one in ANCHORS:
        with torch.device("meta"):
            model = Transformer(ModelSettings(**one.model), one.vocabulary, one.length)
        again = RECOMPUTED[one.checkpointing]
        flops = model.flops_per_token(one.length)
        peak = GPUS[one.gpu].peak
        predicted = USUAL_SHARE * peak / (again * flops)
        mfu = one.rate * flops / peak
        off = predicted / one.rate - 1
        rows.append([one.who, f"{one.rate:,.0f}", f"{mfu:.0%}", f"{predicted:,.0f}", f"{off:+.0%}"])
    return markdown_table(["run", "published", "MFU by our formula", "predicted", "error"], rows)


TABLES = {
    "activations": activations_table,
    "states": states_table,
    "speed": speed_table,
    "context": context_table,
    "anchors": anchors_table,
}


def filled(document: str, gpu: Gpu) -> str:
    """The document with every table between its markers, `<!-- NAME -->` and `<!-- /NAME -->`."""
    for name, make in TABLES.items():
        begin = f"<!-- {name} -->\n"
        end = f"<!-- /{name} -->"
        before, rest = document.split(begin)
        document = f"{before}{begin}{make(gpu)}\n{end}{rest.split(end, 1)[1]}"
    return document


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--gpu", choices=list(GPUS), default="h100", help="hardware (h100)")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    given = parser.parse_args()
    gpu = GPUS[given.gpu]
    if given.write:
        write_text(TARGET, filled(TARGET.read_text(encoding="utf-8"), GPUS["h100"]))
        return 0
    print(f"{gpu.name} per GPU")
    for name, make in TABLES.items():
        print(f"\n{name}\n\n{make(gpu)}")
    return 0


if __name__ == "__main__":
    run_main(main)
