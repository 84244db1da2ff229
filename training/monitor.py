"""What is looked at while a run trains: held-out loss at and beyond the trained length, and text."""

from typing import Protocol

import torch

from data import Tokenizer
from model import Transformer
from model.sampling import Generation, Sampling
from training.console import Console
from training.record import Recorder
from training.settings import SampleSettings


class Targets(Protocol):
    """Fixed held-out targets: all that training knows of evaluation."""

    @property
    def lengths(self) -> list[int]: ...

    def measure(self, model: Transformer, device: torch.device) -> dict[int, tuple[float, int]]:
        """{length: (mean NLL in nats, counted targets)}."""
        ...


def validate(
    targets: Targets,
    model: Transformer,
    device: torch.device,
    autocast: torch.dtype | None,
    recorder: Recorder,
    done: int,
    console: Console,
) -> dict[int, float]:
    """Measure the NLL of the same targets at every length, and write it down; returns it by length."""
    model.eval()
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        found = targets.measure(model, device)
    model.train()
    nll = {length: value for length, (value, _) in found.items()}
    recorder.write(done, "validation", nll=nll, targets=next(iter(found.values()))[1])
    shown = "  ".join(f"{length}: {value:.4f}" for length, value in nll.items())
    console.say(f"step {done} held-out NLL by length  {shown}")
    return nll


def write_samples(
    model: Transformer,
    tokenizer: Tokenizer,
    settings: SampleSettings,
    recorder: Recorder,
    done: int,
    console: Console,
) -> None:
    """Continue each prompt greedily and write the text down."""
    model.eval()
    samples = []
    for prompt in settings.prompts:
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = begin + tokenizer.encode(prompt)
        room = settings.tokens if model.limit is None else min(settings.tokens, model.limit - len(ids) + 1)
        if not ids or room < 1:
            continue
        generation = Generation(model, [ids], room, Sampling(temperature=0), eos_id=tokenizer.eos_id)
        new = [row[0] for row in generation]
        text = tokenizer.decode(ids[len(begin) :] + [token for token in new if token is not None])
        samples.append({"prompt": prompt, "text": text})
        console.say(f"step {done} sample: {text!r}")
    recorder.write(done, "samples", samples=samples)
    model.train()
