"""The exposure of a run: which positions and distances its training data contained."""

from fractions import Fraction
from pathlib import Path

from data import BatchSampler, DataError, PreparedData, open_prepared
from data.preparation.groups import TextGroups
from data.sampling.batches import TrainingText
from data.sampling.exposure import EXPOSURE, Exposure, ExposureLedger, ExposureRule, read_exposure
from errors import TrainingError
from model import ModelSettings
from run_directory.run_settings import RunSettings
from training.checkpoint.storage import steps_of
from training.run.directory import read_manifest, read_settings
from training.stages import stage_of, stages_of

INHERITED = f"parent_{EXPOSURE}"  # in an extension run: the exposure of its ancestors


def with_parents(run: Path, own: Exposure) -> Exposure:
    """A run's own exposure added to that of its ancestors."""
    before = read_exposure(run, INHERITED)
    return own if before is None else before + own


def exposure_rule_of(model: ModelSettings) -> ExposureRule:
    """The exposure rule of the layer with the longest window."""
    kinds = model.kinds.values()
    if any(choice.window is None for choice in kinds):
        return ExposureRule()
    return ExposureRule(
        max(choice.window for choice in kinds), max(choice.sinks for choice in kinds)
    )


def make_batches(settings: RunSettings, prepared: PreparedData) -> BatchSampler:
    """The sampler of a run's batches. Raises TrainingError where no document is as long as the longest stage,
    and DataError where the text is too short for one window."""
    longest = prepared.longest
    shares = settings.data.mixed_shares
    in_groups = settings.data.group_bytes is not None  # a later one may hold longer documents
    has_lengths = len({segment.length for segment in settings.plan}) > 1
    if has_lengths and longest < settings.train_length and not in_groups:
        raise TrainingError(
            f"training.stages go up to {settings.train_length} tokens, and the longest document of "
            f"{prepared.train.folder} has {longest:,}: lower the lengths of the stages"
        )
    groups = TextGroups(settings.data, prepared) if in_groups else None
    texts = zip(prepared.texts, [1 - sum(shares), *shares], strict=True)
    return BatchSampler(
        [
            TrainingText(text.train, Fraction(share), text.folder.name, groups)
            for text, share in texts
        ],
        settings.plan,
        packing=settings.data.packing,
        seed=settings.seed,
        positions=settings.data.positions,
    )


def make_ledger(settings: RunSettings, batches: BatchSampler) -> ExposureLedger:
    stages = stages_of(settings)
    rules = {stage.start: exposure_rule_of(stage.model) for stage in stages}
    return ExposureLedger(
        batches,
        settings.steps,
        lambda step: rules[stage_of(stages, step).start],
        settings.first_step,
    )


def exposure_of(run: Path, step: int | None = None) -> Exposure | None:
    """The exposure of a run after `step` updates (None: at its newest checkpoint): read from its folder, or
    counted where the folder has none of that step.

    None where there is no checkpoint, or the training text is gone or changed.
    """
    step = max(steps_of(run), default=None) if step is None else step
    if step is None:
        return None
    kept = read_exposure(run)
    before = read_exposure(run, INHERITED)
    own_steps = step - read_settings(run).first_step
    if kept is not None and kept.steps == own_steps + (before.steps if before else 0):
        return kept
    about = read_manifest(run)
    try:
        prepared = open_prepared(about.get("data") or "", about.get("mixture", ()))
        if prepared.hash != about.get("data_hash"):
            return None
        settings = read_settings(run)
        own = make_ledger(settings, make_batches(settings, prepared)).upto(step)
        return with_parents(run, own)
    except DataError:
        return None
