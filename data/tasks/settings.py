"""Every setting of the tasks, and of the source that trains on them."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from data.text_settings import DataModel, StdlibSource, TextSettings


class Task(DataModel):
    """What all tasks have in common."""

    name: str
    hides: ClassVar[bool] = False  # the answer stands at a depth of the context
    reads: ClassVar[bool] = False  # the context is text, from `haystack`


class HaystackTask(Task):
    """A task whose answer is hidden in text."""

    hides: ClassVar[bool] = True
    reads: ClassVar[bool] = True

    haystack: TextSettings = Field(StdlibSource(), description="where the text around comes from")
    queries: int = Field(
        1,
        ge=1,
        description="an item has 1 to so many questions, if they fit; the last is scored, the others teach",
    )


class PasskeyTask(HaystackTask):
    """Numbers hidden in text, each under a name; one is asked for, the others of the same text are the
    distractors. With one key, as in Mohtashami and Jaggi 2023 (arXiv:2305.16300), they are numbers that stand
    nowhere."""

    name: Literal["passkey"] = "passkey"
    keys: int = Field(
        3, ge=1, le=64, description="pass keys in an item; where there are several, chance is one in so many"
    )
    choices: int = Field(
        4, ge=2, le=64, description="numbers compared where there is one key; chance is one in so many"
    )
    digits: int = Field(5, ge=1, le=18, description="digits of a pass key")


class NeedleTask(HaystackTask):
    """Facts in words hidden in text: what somebody keeps somewhere. One is asked for, the others of the same
    text are the distractors. After Kamradt 2023 and RULER's multi-key form (arXiv:2404.06654)."""

    name: Literal["needle"] = "needle"
    keys: int = Field(3, ge=2, le=16, description="facts in an item; chance is one in so many")


class VariablesTask(HaystackTask):
    """Chains of assignments in text; the value of the last variable of one chain is asked for, those of the
    others are the distractors. RULER's variable tracking (arXiv:2404.06654)."""

    name: Literal["variables"] = "variables"
    chains: int = Field(2, ge=2, le=16, description="chains in an item; chance is one in so many")
    hops: int = Field(1, ge=0, le=16, description="assignments from variable to variable in a chain")
    digits: int = Field(3, ge=1, le=18, description="digits of a value")


class RecallTask(Task):
    """Multi-query associative recall: as many pairs of key and value as fit, then keys whose values are asked
    for. Arora et al. 2023 (arXiv:2312.04927)."""

    hides: ClassVar[bool] = True

    name: Literal["recall"] = "recall"
    letters: int = Field(2, ge=1, le=4, description="letters of a key; keys of an item are all different")
    digits: int = Field(2, ge=1, le=9, description="digits of a value")
    choices: int = Field(4, ge=2, le=64, description="values compared; chance is one in so many")
    queries: int = Field(
        1, ge=1, description="1 to so many keys are asked for; the last is scored, earlier ones teach"
    )


class CopyTask(Task):
    """A string of symbols, as many as fit, to be written again. Distractors: two symbols exchanged."""

    name: Literal["copy"] = "copy"
    alphabet: str = Field("0123456789", min_length=2, description="symbols; digits are a token each")
    separator: str = Field("", description="text between symbols")
    choices: int = Field(4, ge=2, le=64, description="answers compared; chance is one in so many")


class ReverseTask(CopyTask):
    """A string of symbols, as many as fit, to be written from its end. Distractors: two exchanged."""

    name: Literal["reverse"] = "reverse"  # pyright: ignore[reportIncompatibleVariableOverride]


class ParityTask(Task):
    """The number of ones among binary digits, as many as fit, modulo `modulus`; every other remainder is a
    distractor. 2 is parity."""

    name: Literal["parity"] = "parity"
    modulus: int = Field(2, ge=2, le=10, description="counted modulo this; chance is one in so many")


class AdditionTask(Task):
    """The sum of two numbers of as many digits as fit, with at least one carry. Distractors: sums in which
    one carry was forgotten or made up."""

    name: Literal["addition"] = "addition"
    backwards: bool = Field(False, description="all three numbers are written from their last digit")
    choices: int = Field(4, ge=2, le=16, description="answers compared; chance is one in so many")


TaskSettings = Annotated[
    PasskeyTask
    | NeedleTask
    | VariablesTask
    | RecallTask
    | CopyTask
    | ReverseTask
    | ParityTask
    | AdditionTask,
    Field(discriminator="name"),
]


class TaskSource(DataModel):
    """Items of a task, a document each; alone, or among the documents of a text. Those of an evaluation are
    others, whatever the seed, and so is the text around them."""

    name: Literal["task"] = "task"
    task: TaskSettings = Field(PasskeyTask(), description="which task")  # pyright: ignore[reportCallIssue]
    items: int | None = Field(
        None, ge=1, description="number of items; null: 20,000, or with `text` what `share` asks for"
    )
    length: int | tuple[int, int] = Field(
        254,
        description="bytes of an item, hence at most so many tokens, BOS and EOS not counted; or [least, "
        "most], evenly spread",
    )
    pad: bool = Field(
        False,
        description="newlines behind each item up to the longest: with bytes, a length of train_length - 2, "
        "and packing=intra_document, every window is one whole item",
    )
    seed: int = Field(0, ge=0, description="other seed, other items")
    text: TextSettings | None = Field(None, description="text the items are mixed into; null: items alone")
    share: float = Field(0.1, gt=0, lt=1, description="with `text`: share of all bytes that are items")

    @property
    def least(self) -> int:
        return self.length if isinstance(self.length, int) else self.length[0]

    @property
    def most(self) -> int:
        return self.length if isinstance(self.length, int) else self.length[1]

    @model_validator(mode="after")
    def _consistent(self):
        if not 1 <= self.least <= self.most:
            raise ValueError(f"length must be a number, or [least, most], from 1 on, not {self.length}")
        if self.text is not None and self.items is not None:
            raise ValueError("items and text exclude each other: in a mixture `share` decides how many")
        return self
