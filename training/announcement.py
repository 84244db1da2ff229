"""The summary that train.py prints before the first and after the last step."""

import shlex

from run_directory.run_settings import RunSettings
from run_directory.stages import stages_of
from training.checks import sampled
from training.hardware import peak_memory
from training.setup import TrainingRun
from training.train_state import TrainState

# The value of repeated tokens decays over about 15 repetitions (Muennighoff et al. 2023,
# arXiv:2305.16264).
MANY_EPOCHS = 16


def announce(run: TrainingRun, state: TrainState) -> None:
    """Print the model, data and schedule of a run before its first step."""
    settings = run.settings
    model = run.model
    console = run.console
    s = settings.model
    t = settings.training
    kinds = []
    for name, kind in model.kinds.items():
        of = f"{name}: " if s.pattern else ""
        mixer = kind.mixer.describe()
        kinds.append(f"{of}{kind.position.name}{f', {mixer}' if mixer else ''}")
    console.info(f"run {run.folder}")
    console.info(
        f"model {model.parameter_count() / 1e6:.2f}M parameters, {s.layers} layers, width "
        f"{s.dim}, {s.heads} heads, {s.kv_heads} key/value heads, "
        f"vocabulary {model.vocab_size}, positions {', '.join(kinds)}"
    )
    passes = run.sampler.passes(run.steps)
    most = max(passes.values(), default=0.0)
    data = f"{most:.2f} epochs" if passes else "every item new"
    if len(passes) > 1:
        data = ", ".join(f"{n:.2f} epochs of {label}" for label, n in passes.items())
    console.info(
        f"training {run.steps} steps of {steps_in_words(settings)}: "
        f"{settings.trained_tokens / 1e6:.2f}M tokens, {data}"
    )
    if most > MANY_EPOCHS and not console.quiet:
        console.warn(
            f"training.tokens repeats the text {most:,.0f} times, and beyond about {MANY_EPOCHS} "
            "epochs repeated text adds almost nothing: add text or lower training.tokens"
        )
    for name, rate in t.optimizer.rates.items() if len(t.optimizer.rates) > 1 else ():
        console.info(f"{name} {rate:g}: {state.optimizer.describe(name)}")
    for stage in stages_of(settings)[1:]:
        console.info(stage.describe())
    if settings.data.positions.name != "plain":
        console.info(f"positions of training text: {sampled(settings)}; evaluation counts from 0")
    if t.precision != "float32":
        console.info(f"precision {t.precision}")
    if state.step:
        console.info(f"resuming after step {state.step} of {run.steps}")


def steps_in_words(settings: RunSettings) -> str:
    """Windows per step of each stage: `16 × 128, then 4 × 512 tokens`."""
    return (
        ", then ".join(f"{size.batch_size} × {size.length}" for size in settings.plan) + " tokens"
    )


def announce_end(run: TrainingRun, prompts: list[str]) -> None:
    """Print the summary of a completed run, and commands to evaluate it."""
    folder = run.folder
    settings = run.settings
    console = run.console
    console.info(f"done: {folder} (peak memory {peak_memory(run.device) / 2**20:,.0f} MiB)")
    if len(passes := run.sampler.passes(run.steps)) > 1:
        shares = (f"{label} {n:.2f}" for label, n in passes.items())
        console.info(f"epochs: {', '.join(shares)}")
    if overrides := [override for stage in stages_of(settings) for override in stage.overrides]:
        console.info(f"evaluated and extended with the changes: {', '.join(overrides)}")
    prompt = shlex.quote(prompts[0] if prompts else "")
    console.info(
        f"next: python evaluate.py {folder}   or   python generate.py {folder} --prompt {prompt}"
    )
