"""What train.py says of a run before its first step and after its last."""

from pathlib import Path

import torch

from data import Batches
from model import LinearMixer, Transformer
from model.position.rotary import Rope
from training.console import Console
from training.hardware import peak_memory
from training.optimizer import who_learns_at
from training.retention import best_of
from training.settings import RunSettings
from training.stages import stages_of
from training.start import sampled


def announce(
    settings: RunSettings, model: Transformer, batches: Batches, folder: Path, start: int, console: Console
) -> None:
    """What is about to be trained, in a few lines."""
    s, t = settings.model, settings.training
    scheme = ", ".join(
        f"{kind}: {choice.name}" if len(s.kinds) > 1 else choice.name for kind, choice in s.kinds.items()
    )
    linear = f", linear attention ({s.mixer.form})" if isinstance(s.mixer, LinearMixer) else ""
    console.say(f"run {folder}")
    console.say(
        f"model {model.parameter_count() / 1e6:.2f}M parameters, {s.layers} layers, width {s.dim}, "
        f"{s.heads} heads in {s.kv_heads} groups, vocabulary {model.vocab_size}, positions {scheme}"
        f"{linear}"
    )
    for kind, scheme in model.position.items():
        if isinstance(scheme, Rope):
            turned, pairs = scheme.whole_turns(settings.train_length)
            of = f" ({kind})" if len(s.kinds) > 1 else ""
            console.say(f"pairs that complete a turn within train_length: {turned} of {pairs}{of}")
    passes = {} if settings.data.group_bytes else batches.passes_by_label(settings.steps)
    told = ", ".join(
        f"{n:.2f} epochs" + (f" of {label}" if len(passes) > 1 else "") for label, n in passes.items()
    )
    if not passes:
        told = f"text in groups, the first of {batches.texts[0].store.n_tokens:,} tokens"
    console.say(
        f"training {settings.steps} steps of {steps_in_words(settings)}: "
        f"{settings.trained_tokens / 1e6:.2f}M tokens, {told}"
    )
    for name, rate in t.optimizer.rates.items() if len(t.optimizer.rates) > 1 else ():
        console.say(f"{name} {rate:g}: {who_learns_at(name, model, t.optimizer)}")
    for stage in stages_of(settings)[1:]:
        console.say(stage.describe())
    if settings.data.positions.name != "plain":
        console.say(f"positions of training text: {sampled(settings)}; evaluated text counts from 0")
    for length in sorted({portion.length for portion in settings.plan}):
        of = f" of {length} tokens" if t.stages else ""
        console.say(f"{batches.cut_share(length):.0%} of the documents are cut by the edge of a window{of}")
    if start:
        console.say(f"resuming after step {start} of {settings.steps}")


def steps_in_words(settings: RunSettings) -> str:
    """Windows of a step, stage by stage: `16 × 128, then 4 × 512 tokens`."""
    return ", then ".join(f"{portion.batch_size} × {portion.length}" for portion in settings.plan) + " tokens"


def say_done(
    folder: Path, settings: RunSettings, batches: Batches, device: torch.device, console: Console
) -> None:
    """What a run that has ended leaves to know, and what to do with it next."""
    console.say(f"done: {folder} (peak memory {peak_memory(device) / 2**20:,.0f} MiB)")
    best_at = settings.training.checkpoint.best
    if best_at and (best := best_of(folder, best_at * settings.train_length)):
        console.say(f"best at {best_at} × train_length: step {best[0]}, held-out NLL {best[1]:.4f}")
    if len(batches.texts) > 1:
        passes = batches.passes_by_label(settings.steps).items()
        console.say(f"gone through: {', '.join(f'{label} {n:.2f} times' for label, n in passes)}")
    if words := [word for stage in stages_of(settings) for word in stage.words]:
        console.say(f"evaluated and continued under the changes: {', '.join(words)}")
    console.say(f"next: python evaluate.py {folder}   or   python generate.py {folder} --prompt 'def '")
