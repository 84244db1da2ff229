"""Exported models with what they must reproduce, and the process that checks it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from generation.decoding import Generation
from generation.sampling import SamplingParams
from interop.export.described import ClassChoice
from interop.export.export_folder import write_model
from interop.export.native import choose_class
from model import TokenPositions, Transformer

GENERATED = ClassChoice(None)
CONTROLS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# tokens, beyond the trained length of the zoo
LENGTH = 19
PROMPT = 6
NEW = 9
PADDING = 2


def greedy(model: Transformer, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    steps = list(Generation(model, prompts, tokens, SamplingParams(temperature=0)))
    return [[int(step[row]) for step in steps] for row in range(len(prompts))]


def write(model: Transformer, folder: Path, choice: ClassChoice | None = None) -> ClassChoice:
    """Export a float32 model with logits and greedy tokens of two rows; the second may be
    padded."""
    folder.mkdir()
    choice = choice or choose_class(model)
    write_model(model, choice, folder, CONTROLS)
    length = min(LENGTH, model.limit or LENGTH)
    new = min(NEW, length - PROMPT)
    ids = torch.randint(
        0, model.vocab_size, (2, length), generator=torch.Generator().manual_seed(5)
    )
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    with torch.no_grad():
        plain = model(ids, TokenPositions.plain(length))
        padded = model(ids, TokenPositions.left_padded([length, length - PADDING], length))
    first, second = ids[:, :PROMPT].tolist()
    reference = {
        "ids": ids,
        "mask": mask,
        "prompt": torch.tensor(PROMPT),
        "plain": plain,
        "padded": padded,
        "greedy": torch.tensor(greedy(model, [first, second], new)),
        "ragged": torch.tensor(greedy(model, [first, second[PADDING:]], new)),
    }
    save_file(reference, folder / "reference.safetensors")
    return choice


def load_in_fresh_process(root: Path) -> dict[str, dict]:
    """What transformers finds for each folder of `root`, in a process that does not have this
    repository."""
    script = Path(__file__).with_name("fresh_process.py").read_text(encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(root.parent / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(root)],
        cwd=root.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict, folder: Path, atol: float, is_exact: bool = True) -> None:
    """Check one result of `load_in_fresh_process`; without `is_exact`, full forward passes only."""
    reference = load_file(folder / "reference.safetensors")
    name = folder.name
    assert found["wrong_weights"] == [], name
    for key in ("plain", "last", "loss", *(["padded"] if is_exact else [])):
        assert found[key] <= atol, (name, key, found[key])
    for key in ("greedy", "ragged") if is_exact else ():
        assert found[key] == reference[key].tolist(), (name, key)
