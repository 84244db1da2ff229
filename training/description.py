"""What a run trains, in rows of a label and a text, which train.py prints before the first step and
with --dry-run."""

from model import Transformer
from run_directory.parent_run import ParentRun
from run_directory.run_settings import RunSettings
from run_directory.stages import TrainingSchedule
from training.checks import sampled
from training.optimizer import Optimizer

Row = tuple[str, str]


def describe_run(settings: RunSettings, model: Transformer) -> list[Row]:
    """The model, steps, tokens, stages and learning rates of a run."""
    s = settings.model
    kinds = []
    for name, kind in model.kinds.items():
        label = f"{name}: " if s.pattern else ""
        mixer = kind.mixer.describe()
        kinds.append(f"{label}{kind.position.name}{f', {mixer}' if mixer else ''}")
    windows = ", then ".join(f"{size.batch_size} × {size.length}" for size in settings.plan)
    steps = f"{settings.steps:,} of {windows} tokens"
    tokens = f"{settings.trained_tokens:,}"
    if first := settings.first_step:  # a fork: its parent has trained the first steps
        steps += f"; {settings.steps - first:,} are left after step {first:,}"
        tokens += f"; {settings.trained_tokens - settings.tokens_after(first):,} are left"
    rows = [
        (
            "model",
            f"{model.parameter_count():,} parameters, {s.layers} layers, width {s.dim}, {s.heads} "
            f"heads, {s.kv_heads} key/value heads, vocabulary {model.vocab_size}, positions "
            f"{', '.join(kinds)}",
        ),
        ("steps", steps),
        ("tokens", tokens),
        ("precision", settings.training.precision),
    ]
    if settings.data.positions.name != "plain":
        rows.append(("sampled positions", f"{sampled(settings)}; evaluation counts from 0"))
    for stage in TrainingSchedule(settings).stages[1:]:
        rows.append((f"after step {stage.start:,}", stage.changes))
    optimizer = Optimizer(model, settings.training.optimizer)
    for name, rate in settings.training.optimizer.rates.items():
        rows.append((name, f"{rate:g} {optimizer.describe(name)}"))
    return rows


def describe_parent(settings: RunSettings, parent: ParentRun) -> list[Row]:
    """The runs that a run starts from, and what it changes."""
    first, *earlier = [
        f"{old['run']}, step {old['step']:,} (checkpoint {old['checkpoint_hash'][:10]}), "
        f"trained at {old['train_length']} tokens"
        for old in parent.lineage(settings)
    ]
    rows = [("fork of" if settings.is_fork else "extension of", first)]
    rows += [("before it", text) for text in earlier]
    rows += [("changed", text) for text in parent.changed(settings)]
    if settings.is_fork:
        rows += [("after the fork", text) for text in changed_rates(settings, parent)]
    return rows


def changed_rates(settings: RunSettings, parent: ParentRun) -> list[str]:
    """The learning rates of the first update after a fork that differ by more than 1% from those of
    the parent at that step, or at its end."""
    step = parent.checkpoint.step
    last = min(step, parent.settings.steps - 1)
    before = TrainingSchedule(parent.settings).learning_rates(last)
    there = str(parent.folder) if last == step else f"{parent.folder} at its end"
    return [
        f"{'learning rate' if name == 'lr' else name} at step {step + 1}: {before[name]:.3g} in "
        f"{there}, {rate:.3g} here"
        for name, rate in TrainingSchedule(settings).learning_rates(step).items()
        if name in before and abs(rate - before[name]) > 0.01 * before[name]
    ]
