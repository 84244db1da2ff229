"""Every family: imported models give the logits and text of transformers, past the trained length,
left-padded and with a cache; exports are their class again."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from generation.decoding import Generation
from generation.sampling import SamplingParams
from interop.build import ImportedModel, build_model
from interop.checkpoint import read_folder
from interop.export.export_folder import write_model
from interop.export.native import choose_class
from interop.export.parity import measure
from interop.huggingface.families import FAMILIES
from model import TokenPositions, Transformer
from tests.interop.export.exported import CONTROLS
from tests.interop.models import (
    FIRST,
    ROPES,
    SMALL,
    VARIANTS,
    double_precision,
    in_double,
    type_of,
    variant,
)

LENGTH = 100  # past the 64 trained tokens
COUNTS = [LENGTH, 71, 30]  # of the rows of a left-padded batch: past and within the trained length
# Families that take rotary parameters like a Llama's.
SHARED_ROPE = ("llama", "smollm3", "mistral", "qwen2", "qwen3", "granite", "granite_swa", "olmo2")
QUICK_ROPES = (
    "linear",
    "dynamic",
    "dynamic, original length",
    "llama3",
    "yarn, all settings",
    "longrope",
    "proportional",
)
# Models that another class represents too.
OTHER_CLASSES = {"youtu": "deepseek_v3", "granitemoehybrid, rope": "bamba"}


def tokens_of(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, SMALL["vocab_size"], (rows, LENGTH), generator=generator)


def close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.std() > 0.3, "flat logits would hide a difference"
    atol = tolerance * float(expected.abs().max())
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=atol)


@torch.no_grad()
def check_plain(ours: Transformer, theirs: PreTrainedModel) -> None:
    """In float32; recurrent layers multiply rounding errors of long products."""
    tokens = tokens_of(2)
    is_recurrent = any(kind.mixer.name == "recurrent" for kind in ours.kinds.values())
    found = ours(tokens, TokenPositions.plain(LENGTH))
    close(found, theirs(tokens).logits, 1e-4 if is_recurrent else 1e-5)


@torch.no_grad()
def check_batches(ours: Transformer, theirs: PreTrainedModel) -> None:
    """Rows of several lengths in float64: alone, left-padded in one batch, and with our cache in
    chunks."""
    tokens = tokens_of(3)
    positions = TokenPositions.left_padded(COUNTS, LENGTH)
    padded = ours(tokens, positions)
    cache = ours.make_cache(len(COUNTS), LENGTH)
    parts = [
        ours(tokens[:, start:stop], positions.part(start, stop), cache=cache)
        for start, stop in pairwise((0, 40, 41, 77, LENGTH))
    ]
    # Shortest first: transformers keeps the frequencies of the longest text so far with dynamic
    # NTK.
    for row in sorted(range(len(COUNTS)), key=lambda row: COUNTS[row]):
        count = COUNTS[row]
        alone = tokens[row : row + 1, -count:]
        expected = theirs(alone).logits[0]
        close(ours(alone, TokenPositions.plain(count))[0], expected, 1e-9)
        close(padded[row, -count:], expected, 1e-9)
        close(torch.cat(parts, dim=1)[row, -count:], expected, 1e-9)


def check_text(ours: Transformer, theirs: PreTrainedModel) -> None:
    """Greedy text of a prompt, with transformers' cache and ours."""
    prompt = tokens_of(1)[:, :7]
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    steps = Generation(ours, prompt.tolist(), 8, SamplingParams(temperature=0))
    assert [int(step[0]) for step in steps] == expected[0, 7:].tolist()


def check_export(first: ImportedModel, expected: str, folder) -> None:
    """The class, its logits, and equal settings and weights when it is imported."""
    choice = choose_class(first.model)
    assert choice.model_type == expected, choice.reason
    folder.mkdir()
    write_model(first.model, choice, folder, CONTROLS)
    (parity,) = measure(first.model, folder, expected, [LENGTH - 1])
    assert parity.difference <= 4 * parity.tolerance  # that of trained weights
    second = build_model(read_folder(folder))
    assert second.model.original_length == first.model.original_length
    if expected == first.checkpoint.config["model_type"]:
        assert second.shape.model == first.shape.model
        own = first.model.state_dict()
        torch.testing.assert_close(second.model.state_dict(), own, rtol=0, atol=0)


def cases() -> list:
    """The first variant of each family, and the rotary kinds of one, are quick."""
    names = [(name, None) for name in VARIANTS]
    names += [(family, rope) for family in SHARED_ROPE for rope in ROPES]
    quick = {(name, None) for name in FIRST} | {("llama", rope) for rope in QUICK_ROPES}
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in names]


@pytest.mark.parametrize(("name", "rope"), cases())
def test_import_and_export(name, rope, tmp_path):
    changes = {"rope_parameters": {"rope_theta": 10_000.0} | ROPES[rope]} if rope else {}
    theirs = variant(name, **changes)
    theirs.save_pretrained(tmp_path / "first")
    first = build_model(read_folder(tmp_path / "first"))
    check_plain(first.model, theirs)
    if rope is None:
        check_text(first.model, theirs)
    check_export(first, OTHER_CLASSES.get(name, type_of(name)), tmp_path / "second")
    with double_precision():
        check_batches(copy.deepcopy(first.model).double(), in_double(theirs))


def test_every_family_has_a_variant():
    assert set(FIRST) == {name for name, family in FAMILIES.items() if family.code is None}
