"""What is looked at while a run trains: held-out loss at and beyond the trained length, and text."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from data import Tokenizer
from model import Transformer
from model.sampling import Generation, Sampling
from training.console import Console
from training.errors import TrainingError
from training.parallel import Parallel
from training.record import Recorder
from training.schedule import steps_of
from training.telling_settings import SampleSettings, ValidationSettings


class Targets(Protocol):
    """Fixed held-out targets: all that training knows of evaluation."""

    @property
    def lengths(self) -> list[int]: ...

    @property
    def documents(self) -> int: ...

    @property
    def hash(self) -> str: ...

    def measure(
        self,
        model: Transformer,
        device: torch.device,
        rank: int,
        world: int,
        gather: Callable[[Any], list[Any]],
    ) -> dict[int, tuple[float, int]]:
        """{length: (mean NLL in nats, counted targets)}; NaN where a loss is not finite."""
        ...


def due_looks(settings: ValidationSettings, steps: int) -> frozenset[int]:
    """After which steps of a run of `steps` the held-out loss is measured. Raises TrainingError where `at`
    names one that the run does not have."""
    at = [(one, max(1, steps_of(one, steps))) for one in settings.at]
    for one, step in at:
        if step > steps:
            raise TrainingError(f"training.validation.at has {one:g}, and the run {steps} steps: lower it")
    regular = range(settings.every, steps + 1, settings.every) if settings.every else ()
    return frozenset([*regular, *(step for _, step in at), steps])


def validate(
    targets: Targets,
    model: Transformer,
    parallel: Parallel,
    autocast: torch.dtype | None,
    recorder: Recorder,
    done: int,
) -> dict[int, float]:
    """Measure the NLL of the same targets at every length and write it down; all processes share the work.

    Returns {input tokens: NLL in nats}, on all of them; NaN for a length at which a loss is not finite. A
    policy that keeps the best checkpoint compares these.
    """
    begun, device = time.perf_counter(), parallel.device
    model.eval()
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        found = targets.measure(model, device, parallel.rank, parallel.world, parallel.gather)
    model.train()
    nll = {length: value for length, (value, _) in found.items()}
    about = {
        "targets": next(iter(found.values()))[1],
        "documents": targets.documents,
        "targets_hash": targets.hash[:16],
    }
    recorder.look(done, nll, seconds=time.perf_counter() - begun, **about)
    return nll


def write_samples(
    model: Transformer,
    tokenizer: Tokenizer,
    settings: SampleSettings,
    device: torch.device,
    autocast: torch.dtype | None,
    recorder: Recorder,
    done: int,
    console: Console,
) -> None:
    """Continue each prompt greedily and write the text down; under the autocast of the training passes, as
    sharded blocks are gathered in its dtype."""
    model.eval()
    samples = []
    for prompt in settings.prompts:
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = begin + tokenizer.encode(prompt)
        room = settings.tokens if model.limit is None else min(settings.tokens, model.limit - len(ids) + 1)
        if not ids or room < 1:
            continue
        generation = Generation(model, [ids], room, Sampling(temperature=0), eos_id=tokenizer.eos_id)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            new = [row[0] for row in generation]
        text = tokenizer.decode(ids[len(begin) :] + [token for token in new if token is not None])
        samples.append({"prompt": prompt, "text": text})
        console.say(f"step {done} sample: {text!r}")
    recorder.write(done, "samples", samples=samples)
    model.train()
