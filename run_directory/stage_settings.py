"""Settings of the stages of a run, and their sizes in steps."""

from collections.abc import Sequence

from data.sampling.segments import Segment
from run_directory.optimizer_settings import ShareOrSteps
from settings.fields import StrictSettings, setting


class StageSettings(StrictSettings):
    """A part of the run with one window length, batch size and positional scheme.

    The optimizer state and the learning-rate schedule continue from stage to stage. DroPE
    (arXiv:2512.12167), for example, removes the rotations in its last stage.
    """

    length: int | None = setting(
        None,
        "tokens of a window; the longest of all stages is train_length; null: as in the stage "
        "before, at first train_length",
        ge=2,
    )
    batch_size: int | None = setting(
        None,
        "sequences per optimizer step; null: as in the stage before where length is null, else as "
        "many tokens as training.batch_size × train_length",
        ge=1,
    )
    duration: ShareOrSteps | None = setting(
        None,
        "below 1 a share of training.tokens, from 1 on a number of steps; null, in the last stage "
        "only: the rest of the budget",
        gt=0,
    )
    overrides: list[str] = setting(
        [], "overrides of model.position that a trained model supports; they add to earlier ones"
    )
    warmup: ShareOrSteps = setting(
        0.0,
        "linear rise of the learning rate from 0 when the stage begins: below 1 a share of the "
        "run, from 1 on steps",
        ge=0,
    )


def segments(
    stages: Sequence[StageSettings], tokens: int, train_length: int, batch_size: int
) -> tuple[Segment, ...]:
    """Window length, batch size and steps of every stage of a run on a budget of `tokens`.

    Raises ValueError for stages that are inconsistent or do not fit the budget.
    """
    per_step = batch_size * train_length
    if not stages:
        return (Segment(train_length, batch_size, tokens // per_step),)
    sizes = []
    spent = 0
    slack = 0
    for i, stage in enumerate(stages):
        where = f"training.stages.{i}"
        before = sizes[-1] if sizes else Segment(train_length, batch_size)
        length = stage.length or before.length
        batch = stage.batch_size or (per_step // length if stage.length else before.batch_size)
        if stage.batch_size is None and stage.length and per_step % length:
            raise ValueError(
                f"{where}.batch_size is required: training.batch_size × train_length = {per_step} "
                f"tokens is not a multiple of its length {length}"
            )
        if stage.duration is None and i < len(stages) - 1:
            raise ValueError(
                f"{where}.duration is missing: only that of the last stage may be null"
            )
        each = batch * length
        is_share = stage.duration is None or stage.duration < 1
        due = tokens - spent if stage.duration is None else stage.duration * tokens
        steps = int(due / each + 1e-6) if is_share else int(stage.duration or 0)
        if steps < 1:
            raise ValueError(f"{where} is shorter than one step of {batch} × {length} tokens")
        sizes.append(Segment(length, batch, steps))
        spent = spent + steps * each
        slack = slack + each * is_share
    if (longest := max(segment.length for segment in sizes)) != train_length:
        raise ValueError(
            f"train_length = {train_length} must be the longest of training.stages, {longest}"
        )
    if spent > tokens or tokens - spent >= max(slack, per_step):
        raise ValueError(
            f"training.stages use {spent:,} tokens, and training.tokens = {tokens}: set it to "
            f"{spent}, or change the duration of a stage"
        )
    return tuple(sizes)
