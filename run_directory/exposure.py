"""The exposure of a run: which positions and distances its training data contained."""

from fractions import Fraction
from pathlib import Path

from data import DataError, GeneratedData, RunData
from data.sampling.batches import BatchSampler, ItemSampler, RunSampler, TrainingText
from data.sampling.exposure import EXPOSURE, Exposure, ExposureLedger, ExposureRule, read_exposure
from errors import TrainingError
from model import ModelSettings
from run_directory.run import Run
from run_directory.run_settings import RunSettings
from run_directory.stages import stage_of, stages_of

INHERITED = f"parent_{EXPOSURE}"  # in an extension run: the exposure of its ancestors


def with_parents(folder: Path, own: Exposure) -> Exposure:
    """A run's own exposure added to that of its ancestors."""
    inherited = read_exposure(folder, INHERITED)
    return own if inherited is None else inherited + own


def exposure_rule_of(model: ModelSettings) -> ExposureRule:
    """The exposure rule of the layer with the longest window."""
    schemes = [kind.position for kind in model.resolved_kinds.values()]
    windows = [scheme.window for scheme in schemes if scheme.window is not None]
    if len(windows) < len(schemes):
        return ExposureRule()
    return ExposureRule(max(windows), max(scheme.sinks for scheme in schemes))


def make_sampler(settings: RunSettings, data: RunData) -> RunSampler:
    """The sampler of a run's batches.

    Raises TrainingError where no document is as long as the longest stage, and DataError where the
    text is too short for one window.
    """
    if isinstance(data, GeneratedData):
        items = data.training_items(settings.seed)
        positions = settings.data.positions
        return ItemSampler(items, settings.plan, seed=settings.seed, positions=positions)
    has_lengths = len({segment.length for segment in settings.plan}) > 1
    if has_lengths and data.longest < settings.train_length:
        raise TrainingError(
            f"training.stages go up to {settings.train_length} tokens, and the longest document "
            f"of {data.train.folder} has {data.longest:,}: lower the lengths of the stages"
        )
    shares = settings.data.mixed_shares
    texts = [
        TrainingText(text.train, Fraction(share), text.folder.name)
        for text, share in zip(data.texts, [1 - sum(shares), *shares], strict=True)
    ]
    return BatchSampler(
        texts,
        settings.plan,
        packing=settings.data.packing,
        seed=settings.seed,
        positions=settings.data.positions,
        is_carried=settings.training.state == "carry",
    )


def make_ledger(settings: RunSettings, sampler: RunSampler) -> ExposureLedger:
    """Counts the exposure of a run's own steps."""
    stages = stages_of(settings)
    rules = {stage.start: exposure_rule_of(stage.model) for stage in stages}
    return ExposureLedger(
        sampler,
        settings.steps,
        lambda step: rules[stage_of(stages, step).start],
        settings.first_step,
    )


def exposure_of(run: Run, step: int | None = None) -> Exposure | None:
    """The exposure of a run after `step` updates (None: at its newest checkpoint): read from its
    folder, or counted where the folder has none of that step.

    None where there is no checkpoint, or the training text is gone or changed.
    """
    step = max(run.steps, default=None) if step is None else step
    if step is None:
        return None
    recorded = read_exposure(run.folder)
    inherited = read_exposure(run.folder, INHERITED)
    own_steps = step - run.settings.first_step
    inherited_steps = inherited.steps if inherited else 0
    if recorded is not None and recorded.steps == own_steps + inherited_steps:
        return recorded
    try:
        prepared = run.open_data()
        if prepared.hash != run.manifest.get("data_hash"):
            return None
        ledger = make_ledger(run.settings, make_sampler(run.settings, prepared))
        return with_parents(run.folder, ledger.upto(step))
    except DataError:
        return None
