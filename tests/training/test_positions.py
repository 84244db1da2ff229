"""Sampled positions from the loader through the model: which outputs they change and which they do
not."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch._dynamo

from data.sampling.batches import Batch
from errors import TrainingError
from model import Transformer
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from tests.data.stores import place
from tests.data.test_random_positions import chosen
from tests.model.zoo import build, close, ids
from training.feasibility import check_model
from training.micro_batches import micro_batches

B = 4
T = 11
SAMPLERS = ["random_offset", "random_subset", "random_subset-batch", "cape", "cape-center", "pose"]


def batch_of(name: str, packing: str = "concat", step: int = 0, rows: int = B) -> Batch:
    """A batch of random tokens in windows of two to four documents, placed by a sampler."""
    begins = np.zeros((rows, T), dtype=bool)
    begins[:, 7] = True
    for row in range(rows):
        begins[row, 2 + row % 3] = True
    placed = place(
        packing,
        chosen(name),
        begins,
        seed=1,
        step=step,
        rows=np.arange(rows),
    )
    tokens = ids(rows, T, seed=step)
    return Batch(
        tokens.numpy(),
        tokens.roll(-1, 1).numpy(),
        placed,
        n_targets=tokens.numel(),
        epoch=0,
        hash="",
    )


def losses(net: Transformer, batch: Batch) -> torch.Tensor:
    """(B, T) NLL of the batch's targets."""
    with torch.no_grad():
        (part,) = micro_batches(batch, B, T)
        return net(part.tokens, part.positions, targets=part.targets)


@pytest.mark.parametrize("packing", ["concat", "intra_document"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_micro_batches_use_their_own_rows(name, packing):
    net = build("sinusoidal")
    batch = batch_of(name, packing)
    whole = losses(net, batch)
    for size in (1, 3):
        with torch.no_grad():
            split = micro_batches(batch, size, T)
            parts = [net(x.tokens, x.positions, targets=x.targets) for x in split]
        assert len(parts) == -(-B // size)
        close(torch.cat(parts), whole, atol=1e-12)


LEARNED = "model.position={name: learned, max_length: 300}"
PATTERN = [
    "model.pattern=[a, b]",
    "model.kinds={a: {position: {name: rope}}, b: {position: {name: learned}}}",
]


@pytest.mark.parametrize(
    ("model", "sampler", "message"),
    [
        ([LEARNED], "{name: cape}", "model.position.name = learned "),
        (PATTERN, "{name: cape}", "model.kinds.b.position.name = learned "),
        (
            [LEARNED],
            "{name: random_subset}",
            r"data.positions.name = random_subset needs 2048 positions, but the scheme has 300",
        ),
        (
            [LEARNED],
            "{name: random_offset, max_offset: 237}",
            "needs 301 positions, but the scheme has 300: raise model.position.max_length",
        ),
        ([LEARNED], "{name: pose, target: 301}", "needs 301 positions"),
        ([LEARNED], "{name: pose, target: 300}", None),
        ([], "{name: cape}", None),
    ],
)
def test_unsupported_positions_are_rejected(model, sampler, message):
    words = ["train_length=64", "training.validation.multiples=[1]", f"data.positions={sampler}"]
    settings = load_settings(RunSettings, [*words, *model])
    with pytest.raises(TrainingError, match=message) if message else nullcontext():
        check_model(settings)
