"""docs/scaling.md: its tables are the script's output, and its formulas match the model."""

import pytest
import torch

from model import TokenPositions, Transformer
from model.block import Checkpointing
from run_directory.run_settings import RunSettings
from scripts.docs import scaling
from scripts.docs.scaling import GPUS, MemoryLayout, ModelShape
from settings.load import load_settings
from tests.training.distributed.test_simulated import SMALL, simulations
from training.run.memory import block_parameters


def shape_of(*overrides: str) -> ModelShape:
    return ModelShape("x", load_settings(RunSettings, ["data.tokenizer.name=bytes", *overrides]))


def kept_bytes(shape: ModelShape, sequences: int) -> int:
    """Bytes of all that a forward pass of the model leaves for its backward pass, weights apart."""
    s = shape.settings
    model = Transformer(s.model, 258, s.train_length).initialize(0)
    tokens = torch.randint(258, (sequences, s.train_length + 1))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        place = x.untyped_storage()
        if place.data_ptr() not in weights:
            # held, so that its address is not given again
            kept[place.data_ptr()] = place, place.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(tokens[:, :-1], TokenPositions.plain(s.train_length), tokens[:, 1:])
    return sum(size for _, size in kept.values())


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.dim=96", "model.heads=6", "model.kv_heads=2", "train_length=40"],
        [
            "model.dim=64",
            "model.heads=4",
            "model.kv_heads=4",
            "model.head_dim=24",
            "train_length=72",
        ],
    ],
)
def test_activation_memory_matches_formula(overrides):
    """In float32, to the byte: two layers more keep twice the formula's activations more."""
    overrides = [*overrides, "training.validation.targets=8"]
    few, many = (shape_of(*overrides, f"model.layers={layers}") for layers in (1, 3))
    more = many.activations(False, "none") - few.activations(False, "none")
    assert kept_bytes(many, 3) - kept_bytes(few, 3) == 3 * few.settings.train_length * more


def test_memory_estimate():
    """configs/1b.yaml: 1,100,048,384 parameters, 22 layers of 44,044,288, V = 32,000, C = 2,048."""
    shape = next(one for one in scaling.shapes() if one.name == "1B")
    p = 1_100_048_384
    block = 44_044_288
    assert (shape.parameters, block_parameters(shape.model)) == (p, block)
    alone = scaling.memory(shape, MemoryLayout(1, False, 4))
    assert [alone[key] for key in ("weights", "gradients", "moments", "buckets")] == [
        4 * p,
        4 * p,
        8 * p,
        0,
    ]
    assert alone["bfloat16 copies"] == 2 * (22 * block + 32_000 * 2048)
    # 4·C + H + 2 in float32; 2·C + (2·32 + 2·4)·64 + 4·5632 in bfloat16
    kept = 4 * (4 * 2048 + 34) + 2 * (2 * 2048 + 72 * 64 + 4 * 5632)
    assert alone["activations"] == 4 * 2048 * 22 * kept
    again = scaling.memory(shape, MemoryLayout(1, False, 4, checkpointing="full"))
    assert again["activations"] == 4 * 2048 * (22 * 2048 * 4 + kept)
    split = scaling.memory(shape, MemoryLayout(8, True, 4))
    assert split["weights"] == p / 2 and split["moments"] == p
    assert split["whole blocks"] == 10 * block + 8 * (p - 22 * block)
    assert scaling.memory(shape, MemoryLayout(8, False, 4))["buckets"] == 4 * p


def test_communication_estimate():
    """8 GPUs: seven eighths of the bytes over 450 GB/s. 64: as much, and seven eighths over 8 × 50 GB/s."""
    gpu = GPUS["h100"]
    assert scaling.gather_seconds(8e9, 1, gpu) == 0
    assert scaling.gather_seconds(8e9, 8, gpu) == pytest.approx(7e9 / 450e9)
    assert scaling.gather_seconds(8e9, 64, gpu) == pytest.approx(7e9 / 450e9 + 7e9 / 400e9)
    shape = next(one for one in scaling.shapes() if one.name == "1B")
    p = shape.parameters
    ddp = scaling.communication(shape, MemoryLayout(8, False, 8), gpu)
    assert ddp == pytest.approx(2 * 4 * p * 7 / 8 / 450e9)  # whatever the passes: once a step
    fsdp = scaling.communication(shape, MemoryLayout(8, True, 8), gpu)
    assert scaling.passes(shape, MemoryLayout(8, True, 8)) == 4
    assert fsdp == pytest.approx(4 * (2 + 2 + 4) * p * 7 / 8 / 450e9)
    work = scaling.compute(shape, MemoryLayout(8, True, 8), gpu, share=0.5)
    assert work == pytest.approx(256 * 2048 * shape.flops / 8 / (0.5 * 989e12))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_communication_formulas_match_counted_bytes(checkpointing):
    """Two windows in bfloat16, one for each of two context groups of four processes, under FSDP2."""
    case = [
        "training.precision=bfloat16",
        f"training.parallel.activation_checkpointing={checkpointing == 'full'}",
    ]
    case += [
        "training.parallel.context=4",
        "training.parallel.sharding=full",
        "training.batch_size=2",
    ]
    found = simulations({"": (case, 8)})[""]
    shape = shape_of(*SMALL, *case)
    layout = MemoryLayout(8, True, 1, checkpointing, context=4)
    moved = [found[name, "context"].nbytes for name in ("all-gather", "reduce-scatter")]
    assert sum(moved) == scaling.context_bytes(shape.model, 24, layout)
    # Embedding and norms of the output are gathered once, in float32: as much as twice in bfloat16.
    p = sum(w.numel() for w in shape.model.parameters()) - 2 * 32 * 2  # of 256 ids, not 258
    assert found["all-gather", "all"].nbytes == 2 * scaling.HALF * p
    assert found["reduce-scatter", "all"].nbytes == scaling.FLOAT * p


def test_smallest_fitting_layout():
    gpu = GPUS["h100"]
    for shape in scaling.shapes():
        for world in scaling.WORLDS:
            layout = scaling.best_layout(shape, world, True, gpu)
            if layout is not None:
                assert sum(scaling.memory(shape, layout).values()) <= 0.9 * gpu.memory
                assert shape.settings.training.batch_size % (world * layout.sequences) == 0
    seven = next(one for one in scaling.shapes() if one.name == "7B")
    assert scaling.best_layout(seven, 8, False, gpu) is None  # its states alone are 108 GB


def most(
    shape: ModelShape, world: int, sharded: bool, checkpointing: Checkpointing = "none"
) -> int:
    """The most sequences a pass has room for."""
    room = scaling.USABLE * GPUS["h100"].memory

    def fits(n: int) -> bool:
        return (
            sum(scaling.memory(shape, MemoryLayout(world, sharded, n, checkpointing)).values())
            <= room
        )

    return next(n for n in range(100) if not fits(n + 1))


def test_documented_limits_match_estimate():
    shape = next(one for one in scaling.shapes() if one.name == "1B")
    assert [most(shape, 8, sharded) for sharded in (False, True)] == [10, 15]
    layouts = [scaling.best_layout(shape, 8, sharded, GPUS["h100"]) for sharded in (False, True)]
    assert [(scaling.passes(shape, one), one.sequences) for one in layouts if one] == [
        (4, 8),
        (4, 8),
    ]
    sizes = {}
    file = str(scaling.ROOT / "configs" / "1b.yaml")
    for dim, layers, hidden in ((2816, 30, 7552), (3072, 28, 8192), (3072, 32, 8192)):
        heads = ["model.kv_heads=4", f"model.heads={dim // 64}", f"model.ffn_dim={hidden}"]
        overrides = [file, f"model.dim={dim}", f"model.layers={layers}", *heads]
        one = ModelShape("x", load_settings(RunSettings, overrides))
        sizes[f"{one.parameters / 1e9:.1f}B"] = [
            most(one, 8, False, again) > 0 for again in ("none", "full")
        ]
    assert sizes == {"2.6B": [True, True], "2.9B": [False, True], "3.3B": [False, False]}


def test_document_tables_match_script():
    text = scaling.TARGET.read_text(encoding="utf-8")
    assert scaling.filled(text, GPUS["h100"]) == text, "python scripts/docs/scaling.py --write"
