"""Traces of training steps with torch.profiler, written to the run directory."""

from contextlib import AbstractContextManager, nullcontext

import torch

from training.setup import TrainingRun


def profiler(run: TrainingRun, done: int) -> AbstractContextManager[torch.profiler.profile | None]:
    """Traces the steps that training.profile names, unless they are among the `done` ones of
    earlier attempts: call `step` after each; None without that setting."""
    p = run.settings.training.profile
    if p is None or p.start < done:
        return nullcontext()
    name = f"steps-{p.start + 1}-{p.start + p.steps}-rank{run.parallel.rank}.json"
    file = run.folder / "profile" / name

    def write(trace: torch.profiler.profile) -> None:
        file.parent.mkdir(exist_ok=True)
        trace.export_chrome_trace(str(file))
        run.console.info(f"trace: {file}")

    skipped = p.start - done
    schedule = torch.profiler.schedule(
        skip_first=max(0, skipped - 1),
        wait=0,
        warmup=min(1, skipped),
        active=p.steps,
        repeat=1,
    )
    return torch.profiler.profile(schedule=schedule, on_trace_ready=write)
