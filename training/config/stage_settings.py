"""Settings of what changes on the way through a run: lengths of the windows, and positional schemes."""

from collections.abc import Sequence

from pydantic import Field

from data.sampling.segments import Segment
from training.config.trainer_settings import Settings, ShareOrSteps


class ChangeSettings(Settings):
    """From a step on, the same weights under other settings of their positional scheme; DroPE
    (arXiv:2512.12167) switches rotations off near the end of the run."""

    at: ShareOrSteps = Field(
        gt=0, description="steps before the change: below 1 a share of the run, from 1 on a number of steps"
    )
    words: list[str] = Field(
        min_length=1,
        description="the change: settings of model.position that may differ after training",
    )
    warmup: ShareOrSteps = Field(
        default=0.0,
        ge=0,
        description="the learning rate rises from 0 again, to where the schedule is: a share of the run, or "
        "steps",
    )


class StageSettings(Settings):
    """A part of the run with windows of one length; the optimizer goes on from stage to stage, and the
    schedule runs over all of them."""

    length: int = Field(ge=2, description="tokens of a window; the longest of all stages is train_length")
    batch_size: int | None = Field(
        None,
        ge=1,
        description="sequences per optimizer step; null: as many tokens as batch_size × train_length",
    )
    duration: ShareOrSteps | None = Field(
        None,
        gt=0,
        description="below 1 a share of training.tokens, from 1 on a number of steps; null, for the last "
        "stage: what the budget leaves",
    )
    words: list[str] = Field(
        [], description="settings of model.position that change as the stage begins, as in training.changes"
    )
    warmup: ShareOrSteps = Field(
        0.0,
        ge=0,
        description="the learning rate rises from 0 again as the stage begins: share of run, or steps",
    )


def portions(
    stages: Sequence[StageSettings], tokens: int, length: int, batch_size: int
) -> tuple[Segment, ...]:
    """The steps of a run that may spend `tokens`, where `batch_size` × `length` tokens are a step unless a
    stage says otherwise. Raises ValueError for stages that do not fit each other or the budget."""
    per_step = batch_size * length
    if not stages:
        return (Segment(length, batch_size, tokens // per_step),)
    longest, last = max(stage.length for stage in stages), len(stages) - 1
    if longest != length:
        raise ValueError(
            f"train_length = {length} must be the longest of training.stages, which is {longest}: set it so"
        )
    found, spent, slack = [], 0, 0
    for i, stage in enumerate(stages):
        where = f"training.stages.{i}"
        batch = stage.batch_size or per_step // stage.length
        if stage.batch_size is None and per_step % stage.length:
            raise ValueError(
                f"{where}: a step of training.batch_size × train_length = {per_step} tokens is no whole "
                f"number of windows of {stage.length}: give its batch_size"
            )
        if stage.duration is None and i < last:
            raise ValueError(
                f"{where}.duration is missing: only the last stage may take what the budget leaves"
            )
        each = batch * stage.length
        share = stage.duration is None or stage.duration < 1
        due = tokens - spent if stage.duration is None else stage.duration * tokens
        steps = int(due / each + 1e-6) if share else int(stage.duration or 0)
        if steps < 1:
            raise ValueError(f"{where} would last less than one step of {batch} × {stage.length} tokens")
        found.append(Segment(stage.length, batch, steps))
        spent, slack = spent + steps * each, slack + each * share
    if spent > tokens:
        raise ValueError(
            f"training.stages take {spent:,} tokens, training.tokens = {tokens} pays for fewer: raise it to "
            f"{spent}, or shorten a stage"
        )
    if tokens - spent >= max(slack, per_step):
        raise ValueError(
            f"training.stages use {spent:,} of training.tokens = {tokens}: lower it to {spent}, lengthen a "
            "stage, or leave out the last stage's `duration`"
        )
    return tuple(found)
