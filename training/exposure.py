"""The exposure ledger of a run: kept beside its checkpoints, or counted from its settings and its text."""

from fractions import Fraction
from pathlib import Path

from data import Batches, DataError, Prepared, open_prepared
from data.batches import Text
from data.exposure import EXPOSURE, Exposure, Ledger, Sight, read_exposure
from data.groups import Groups
from model import ModelSettings
from training.checkpoint import steps_of
from training.errors import TrainingError
from training.files import read_json
from training.fork import first_step
from training.run import MANIFEST, read_settings
from training.settings import RunSettings
from training.stages import stage_of, stages_of

INHERITED = f"parent_{EXPOSURE}"  # in a branch: what the runs behind it have been shown


def with_parents(run: Path, own: Exposure) -> Exposure:
    """A run's own exposure after that of the runs behind it."""
    before = read_exposure(run, INHERITED)
    return own if before is None else before + own


def sight_of(model: ModelSettings) -> Sight:
    """What the farthest-seeing layer sees."""
    kinds = model.kinds.values()
    if any(choice.window is None for choice in kinds):
        return Sight()
    return Sight(max(choice.window for choice in kinds), max(choice.sinks for choice in kinds))


def make_batches(settings: RunSettings, prepared: Prepared) -> Batches:
    """The order in which a run sees its text. Raises TrainingError where no text would show a curriculum its
    longest windows, DataError where there is not enough for one."""
    longest, shares = prepared.longest, settings.data.mixed_shares
    in_groups = settings.data.group_bytes is not None  # a later one may hold longer documents
    if settings.training.stages and longest < settings.train_length and not in_groups:
        raise TrainingError(
            f"training.stages go up to {settings.train_length} tokens, and the longest document of "
            f"{prepared.train.folder} has {longest:,}: no text would show that length; shorten the stages"
        )
    groups = Groups(settings.data, prepared) if in_groups else None
    texts = zip(prepared.texts, [1 - sum(shares), *shares], strict=True)
    return Batches(
        [Text(text.train, Fraction(share), text.folder.name, groups) for text, share in texts],
        settings.plan,
        packing=settings.data.packing,
        seed=settings.seed,
        positions=settings.data.positions,
    )


def make_ledger(settings: RunSettings, batches: Batches) -> Ledger:
    stages = stages_of(settings)
    sights = {stage.start: sight_of(stage.model) for stage in stages}
    return Ledger(
        batches, settings.steps, lambda step: sights[stage_of(stages, step).start], first_step(settings)
    )


def exposure_of(run: Path, step: int | None = None) -> Exposure | None:
    """What a run has been shown after `step` updates (None: at its newest checkpoint): read from its folder,
    or counted where that holds another step's ledger or none.

    None where it cannot be known: no checkpoint, or the text it was trained on is gone or another.
    """
    step = max(steps_of(run), default=None) if step is None else step
    if step is None:
        return None
    kept, before = read_exposure(run), read_exposure(run, INHERITED)
    own_steps = step - first_step(read_settings(run))
    if kept is not None and kept.steps == own_steps + (before.steps if before else 0):
        return kept
    about = read_json(run / MANIFEST)
    try:
        prepared = open_prepared(about.get("data") or "", about.get("mixture", ()))
        if prepared.hash != about.get("data_hash"):
            return None
        settings = read_settings(run)
        own = make_ledger(settings, make_batches(settings, prepared)).upto(step)
        return with_parents(run, own)
    except DataError:
        return None
