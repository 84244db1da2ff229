"""Validation during training: held-out loss at and beyond the trained length, and generated samples."""

import time
from contextlib import nullcontext

import torch

from data import Tokenizer, TokenStore
from generation.decoding import Generation
from generation.sampling import SamplingParams
from training.logging.metrics_logger import MetricsLogger
from training.optim.ema import EMA
from training.run.checks import validation_steps
from training.run.setup import TrainingRun

OPENING = 16  # tokens of a held-out document that the default prompt is taken from


class Validator:
    """Measures the held-out loss and generates samples at the steps that the settings name, with the weights
    of the EMA where there is one. All processes share the work.

    nll: {step: {input tokens: NLL in nats}} of the validations so far, on all processes; NaN for a length at
        which a loss is not finite.
    """

    def __init__(self, run: TrainingRun, ema: EMA | None, logger: MetricsLogger):
        self.run = run
        self.ema = ema
        self.logger = logger
        t = run.settings.training
        self._steps = validation_steps(t.validation, run.settings.steps)
        self._sample_interval = t.samples.interval
        self.nll: dict[int, dict[int, float]] = {}
        own = t.samples.prompts
        self.prompts = [opening(run.data.valid, run.data.tokenizer)] if own is None else own

    def is_due(self, step: int) -> bool:
        """Whether to validate or to generate samples after `step` updates."""
        return step in self._steps or self._samples_are_due(step)

    def _samples_are_due(self, step: int) -> bool:
        every = self._sample_interval
        return step == self.run.settings.steps or (every is not None and step % every == 0)

    def run_step(self, step: int) -> None:
        """Validate and generate samples after `step` updates, each where it is due."""
        parallel = self.run.parallel
        model = self.run.model
        model.eval()
        with self.ema.applied() if self.ema else nullcontext():
            if step in self._steps:
                self._validate(step)
            if self._samples_are_due(step) and parallel.takes_part:
                self._sample(step)
        model.train()
        parallel.reshard(model)
        parallel.wait()
        self.logger.resume_clock()

    def _validate(self, step: int) -> None:
        begun = time.perf_counter()
        parallel = self.run.parallel
        targets = self.run.targets
        with self._autocast():
            found = targets.measure(
                self.run.model, parallel.device, parallel.rank, parallel.world, parallel.gather
            )
        self.nll[step] = {length: value for length, (value, _) in found.items()}
        self.logger.write(
            step,
            "validation",
            nll=self.nll[step],
            targets=next(iter(found.values()))[1],
            documents=targets.documents,
            seconds=time.perf_counter() - begun,
            targets_hash=targets.hash[:16],
        )

    def _sample(self, step: int) -> None:
        """Continue each prompt greedily; with autocast, as sharded blocks are gathered in its dtype."""
        model = self.run.model
        tokenizer = self.run.data.tokenizer
        settings = self.run.settings
        length = settings.training.samples.tokens
        bos_id = tokenizer.bos_id
        bos = [bos_id] if settings.data.bos and bos_id is not None else []
        samples = []
        for prompt in self.prompts:
            ids = bos + tokenizer.encode(prompt)
            room = length if model.limit is None else min(length, model.limit - len(ids) + 1)
            if not ids or room < 1:
                continue
            generation = Generation(
                model,
                [ids],
                room,
                SamplingParams(temperature=0),
                eos_ids=tokenizer.eos_ids,
                vocab_size=tokenizer.vocab_size,
            )
            with self._autocast():
                new = [row[0] for row in generation]
            text = tokenizer.decode(ids[len(bos) :] + [token for token in new if token is not None])
            samples.append({"prompt": prompt, "text": text})
            self.run.console.info(f"step {step} sample: {text!r}")
        self.logger.write(step, "samples", samples=samples)

    def _autocast(self) -> torch.autocast:
        dtype = self.run.autocast
        return torch.autocast(self.run.device.type, dtype, enabled=dtype is not None)


def opening(store: TokenStore, tokenizer: Tokenizer) -> str:
    """The first whole words of the first document, up to the end of its first line."""
    begin = int(store.has_bos)
    text = tokenizer.decode(store.document(0)[begin : begin + OPENING].tolist()).strip()
    line = text.splitlines()[0] if text else ""
    return (line.rsplit(None, 1)[0] if " " in line else line).rstrip("\ufffd")
