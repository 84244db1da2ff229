"""Descriptions of a run, in rows of (label, text), which train.py prints before the first step and
with --dry-run."""

from model import Transformer
from run_directory.parent_run import ParentRun
from run_directory.run_settings import RunSettings, short_text
from run_directory.training_schedule import TrainingSchedule
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
        sampler = short_text(settings.data.positions.model_dump())
        rows.append(("sampled positions", f"{sampler}; evaluation counts from 0"))
    for stage in TrainingSchedule(settings).stages[1:]:
        rows.append((f"after step {stage.start:,}", stage.changes))
    optimizer = Optimizer(model, settings.training.optimizer)
    for name, rate in settings.training.optimizer.rates.items():
        rows.append((name, f"{rate:g} {optimizer.describe(name)}"))
    return rows


def describe_parent(settings: RunSettings, parent: ParentRun) -> list[Row]:
    """The ancestors of a run, and the settings that it changes."""
    first, *earlier = [
        f"{old['run']}, step {old['step']:,} (checkpoint {old['checkpoint_hash'][:10]}), "
        f"trained at {old['train_length']} tokens"
        for old in parent.lineage(settings)
    ]
    rows = [("fork of" if settings.is_fork else "extension of", first)]
    rows += [("before it", text) for text in earlier]
    rows += [("changed", text) for text in parent.changes(settings)]
    return rows
