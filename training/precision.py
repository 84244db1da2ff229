"""The precision of a run with `training.precision: auto`: chosen when it is created, then kept."""

from pathlib import Path

import torch

from model.loss import LOGITS_AT_ONCE
from run_directory.parent_run import ParentRun
from run_directory.run import Run, is_run
from run_directory.run_settings import RunSettings
from training.hardware import has_bfloat16, product_seconds
from training.memory import vocabulary_of
from training.parallel import Parallel

PRECISION = "precision"  # manifest key: what `auto` was resolved to
FASTER = 0.9  # bfloat16 is chosen where its product takes at most this share of the time


def resolve_precision(
    settings: RunSettings,
    parent: ParentRun | None,
    folder: Path | None,
    parallel: Parallel,
    given: str | None = None,
) -> str:
    """The precision of a run: that of its settings, or what `auto` resolves to.

    Existing runs and forks keep theirs. A new one takes `given` or else bfloat16 on GPUs that have
    it and, on CPUs that have it, where the largest matrix product of the model is faster. Every
    process must call it; the main one decides.
    """
    precision = settings.training.precision
    if precision != "auto":
        return precision
    if folder is not None and is_run(folder):
        return Run(folder).manifest.get(PRECISION, "float32")
    if parent is not None and settings.is_fork and parent.about.get(PRECISION):
        return parent.about[PRECISION]
    if given is not None:
        return given
    if parallel.device_type != parallel.device.type:  # simulated GPUs
        return "bfloat16"
    chosen = faster_precision(settings, parent, parallel.device) if parallel.main else None
    return parallel.gather(chosen)[0]


def faster_precision(settings: RunSettings, parent: ParentRun | None, device: torch.device) -> str:
    """The faster precision on a device for the largest matrix product of a model."""
    if not has_bfloat16(device):
        return "float32"
    if device.type == "cuda":
        return "bfloat16"
    t = settings.training
    tokens = (t.micro_batch_size or t.batch_size) * settings.train_length
    vocab_size = vocabulary_of(settings, parent)
    feed_forward = (tokens, settings.model.dim, 2 * settings.model.ffn_dim)
    head = (min(tokens, LOGITS_AT_ONCE["cpu"] // vocab_size + 1), settings.model.dim, vocab_size)
    largest = max(feed_forward, head, key=lambda sizes: sizes[0] * sizes[2])
    half = product_seconds(*largest, torch.bfloat16)
    full = product_seconds(*largest, torch.float32)
    return "bfloat16" if half <= FASTER * full else "float32"
