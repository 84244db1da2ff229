"""Validation during training: held-out loss at and beyond the trained length, and generated
samples."""

import time
from contextlib import nullcontext

from data.task_data import generated
from run_directory.training_settings import steps_every
from training.metrics import Metrics
from training.setup import TrainingRun
from training.train_state import TrainState


class Validation:
    """Measures the held-out loss and generates samples, with the weights of the EMA if there is
    one. All processes share the work.

    Attributes:
        steps: the steps after which `run` is called; in an extension run also 0, under its new
            settings.
        prompts: the prompts of the samples.
    """

    def __init__(self, run: TrainingRun, metrics: Metrics):
        t = run.settings.training
        self._run = run
        self._metrics = metrics
        self._loss_steps = t.validation.steps(run.steps)
        if run.settings.parent is not None:
            self._loss_steps |= {0}
        self._sample_steps = steps_every(t.samples.interval, run.steps)
        self.steps = self._loss_steps | self._sample_steps
        prompts = t.samples.prompts
        self.prompts = [run.data.opening()] if prompts is None else prompts

    def run(self, state: TrainState) -> None:
        """Validate and generate samples after `state.step` updates, each if it is due."""
        parallel = self._run.parallel
        model = state.model
        model.eval()
        with state.ema.applied() if state.ema else nullcontext(), parallel.autocast():
            if state.step in self._loss_steps:
                self._measure_loss(state)
            if state.step in self._sample_steps and parallel.takes_part:
                self._generate_samples(state)
        model.train()
        parallel.reshard(model)
        parallel.wait()
        self._metrics.resume_clock()

    def _measure_loss(self, state: TrainState) -> None:
        begun = time.perf_counter()
        parallel = self._run.parallel
        targets = self._run.targets
        measured = targets.measure(
            state.model, parallel.device, parallel.rank, parallel.world, parallel.gather
        )
        counts = [count for _, count in measured.values()]
        self._metrics.write(
            state.step,
            "validation",
            nll={length: mean for length, (mean, _) in measured.items()},
            targets=counts[0],
            documents=targets.documents,
            seconds=time.perf_counter() - begun,
            targets_hash=targets.hash[:16],
        )

    def _generate_samples(self, state: TrainState) -> None:
        """Continue each prompt greedily; with autocast, because sharded blocks are gathered in its
        dtype."""
        # The start of a run does not wait for these modules.
        from generation.samples import generate_samples, make_samples
        from generation.sampling import SamplingParams

        run = self._run
        limit = state.model.limit
        tokenizer = run.data.tokenizer
        bos = run.settings.data.bos and tokenizer.bos_id is not None
        prompts = [prompt for prompt in self.prompts if prompt or bos]
        samples = []
        for sample in make_samples(prompts, tokenizer, bos=bos, count=1, seed=0, stops=()):
            room = run.settings.training.samples.tokens
            if limit is not None:
                room = min(room, limit - len(sample.ids) + 1)
            if room < 1:
                continue
            sampling = SamplingParams(temperature=0)
            items = generated(run.settings.data)
            for _ in generate_samples(
                state.model, tokenizer, [sample], room, sampling, items=items
            ):
                pass
            text = sample.prompt + sample.text
            samples.append({"prompt": sample.prompt, "text": text})
            run.console.info(f"step {state.step} sample: {text!r}")
        self._metrics.write(state.step, "samples", samples=samples)
