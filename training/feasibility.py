"""Checks that the model and the processes of a run are possible, from its settings, without
data."""

from errors import TrainingError
from model import SCHEMES
from model.carried_state import check_carried
from run_directory.position_overrides import meta_model
from run_directory.run_settings import RunSettings
from run_directory.training_schedule import stages_of
from training.optimizer import role_of
from training.parallel import Parallel


def input_limit(settings: RunSettings) -> int | None:
    """The longest input that the model supports at every stage of the run; None if unlimited.

    Raises ModelError or TrainingError for an invalid stage; nothing is allocated.
    """
    stages = [settings.model_copy(update={"model": stage.model}) for stage in stages_of(settings)]
    limits = [meta_model(stage).limit for stage in stages]
    return min((limit for limit in limits if limit is not None), default=None)


def check_model(settings: RunSettings) -> None:
    """Raise for an invalid model shape, positional scheme, stage or validation length, before any
    data are read."""
    limit = input_limit(settings)
    length = settings.train_length
    sampler = settings.data.positions
    longest = settings.data.position_end(length)
    shortest = min(settings.training.validation.multiples) * length
    if settings.data.gives_positions:
        shortest = 0  # validation uses the positions of training
    else:
        longest = max(longest, length)
    for name, kind in settings.model.resolved_kinds.items():
        scheme = kind.position.name
        if sampler.fractional and not SCHEMES[scheme][1].supports_fractions:
            raise TrainingError(
                f"data.positions.name = {sampler.name} draws fractional positions, which "
                f"{settings.model.position_key(name)}.name = {scheme} does not support; change one "
                "of them"
            )
    if limit is not None and limit < longest:
        raise TrainingError(
            f"train_length {length} with data.positions.name = {sampler.name} needs {longest} "
            f"positions, but the scheme has {limit}: raise {_end_of(settings)}, or lower "
            "train_length or the largest sampled position"
        )
    if limit is not None and limit < shortest:
        raise TrainingError(
            f"training.validation.multiples: the shortest length is {shortest} tokens, but the "
            f"scheme has {limit} positions; add 1, the trained length, to the list"
        )
    if settings.training.state == "carry":
        for stage in stages_of(settings):
            check_carried(stage.model)
        if limit is not None:
            raise TrainingError(
                "training.state = carry: positions continue through each document, but those of "
                f"this scheme end at {limit - 1}; choose another scheme, or set training.state to "
                "reset"
            )


def _end_of(settings: RunSettings) -> str:
    """The setting that limits the positions, for an error message."""
    for name, kind in settings.model.resolved_kinds.items():
        for key in ("max_length", "scale_base"):
            if key in type(kind.position).model_fields:
                return f"{settings.model.position_key(name)}.{key}"
    return "model.dim"


def check_processes(settings: RunSettings, parallel: Parallel) -> None:
    """Raise TrainingError for a batch size that is not a multiple of the number of ranks or context
    groups, for windows that are too short for a context group, for a sharded model whose learned
    positional scheme changes during training, because sharded parameters cannot be replaced, and
    for CUDA graphs on other devices than a single GPU."""
    if settings.training.cuda_graphs and (parallel.world > 1 or parallel.device_type != "cuda"):
        raise TrainingError(
            f"training.cuda_graphs requires one process with a GPU, not {parallel.world} on "
            f"{parallel.device_type}: set it to false"
        )
    context = settings.training.parallel.context
    groups = parallel.data_world
    chunks = 2 * context if context > 1 else 1
    for i, step_range in enumerate(settings.step_ranges):
        stage = f"training.stages.{i}." if settings.training.stages else ""
        if step_range.batch_size % groups:
            number = "processes" if context == 1 else f"context groups (of {context} processes)"
            raise TrainingError(
                f"{stage or 'training.'}batch_size {step_range.batch_size} must be a multiple of "
                f"the number of {number}, {groups}"
            )
        if step_range.length < chunks:
            raise TrainingError(
                f"{f'{stage}length' if stage else 'train_length'} {step_range.length} is less than "
                f"{chunks}, 2 × training.parallel.context: set it to {chunks} or more, or "
                f"training.parallel.context to {max(1, step_range.length // 2)} or less"
            )
    if parallel.sharded and any(stage.overrides for stage in stages_of(settings)):
        weights = meta_model(settings).named_parameters()
        if any(role_of(name, weight) == "positions" for name, weight in weights):
            raise TrainingError(
                "training.stages: overrides cannot change a positional scheme with learned "
                "parameters while the model is sharded; remove them, or set "
                "training.parallel.sharding=none and launch without FSDP"
            )
