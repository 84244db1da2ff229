"""Draw the items of an evaluation: the same questions at every length, method and scheme."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from data import DataError, GeneratedData, Tokenizer
from data.data_settings import SymbolSource
from data.files import canonical_hash, sha256_of
from data.sampling.packing import IGNORED, PositionedTokens
from data.sampling.position_samplers import PLAIN, PlainPositions
from data.task_data import ItemRows
from data.tasks import NO_TEXT, Haystacks, HaystackTask, SymbolTask, Task, TaskItem, TaskItems
from data.tokenizers import SymbolTokenizer
from errors import EvaluationError
from evaluation.evaluation_settings import TaskEvaluationSettings


class ItemTokens(NamedTuple):
    """Items as a model reads them. An item in text has C candidates with the same number of tokens,
    the correct one first; an item on symbols has one, which is the whole item.

    Attributes:
        prompts: for each item, the tokens that are read once, before all candidates.
        inputs: for each item, the tokens that are read for each candidate, (C, A) int64.
        targets: for each item, the tokens predicted at the end of the prompt and at the inputs, (C,
            A + 1), or (C, A) without a prompt; IGNORED at tokens without a target.
        placed: positions of the inputs; None: 0, 1, 2, ...
    """

    prompts: Sequence[np.ndarray] | np.ndarray
    inputs: Sequence[np.ndarray] | np.ndarray
    targets: Sequence[np.ndarray] | np.ndarray
    placed: PositionedTokens | None = None


def text_tokens(items: Sequence[TaskItem], bos: int | None) -> ItemTokens:
    """The tokens of items in text; the candidates of an item share its prompt."""
    begin = [] if bos is None else [bos]
    prompts = [np.array([*begin, *item.prompt]) for item in items]
    candidates = [np.array([item.answer, *item.others]) for item in items]
    return ItemTokens(prompts, [tokens[:, :-1] for tokens in candidates], candidates)


def symbol_tokens(rows: ItemRows, placed: PositionedTokens) -> ItemTokens:
    """The tokens of items on symbols; every answer is a target."""
    return ItemTokens(rows.inputs[:, :0], rows.inputs[:, None], rows.targets[:, None], placed)


@dataclass(frozen=True, kw_only=True)
class DrawnLength:
    """The items of one length.

    Attributes:
        tokens: tokens of the items, in their order.
        inputs: number of inputs of the longest item, including a leading BOS: the declared length.
        positions: number of positions that the items require.
        hash: hash of everything that determines the scores; only results with equal hashes are
            comparable.
        chance: mean accuracy of uniform guesses.
        shortest: length of the shortest problems on symbols.
    """

    tokens: ItemTokens
    inputs: int
    positions: int
    hash: str
    chance: float
    shortest: int | None = None


@dataclass(frozen=True, kw_only=True)
class DrawnItems:
    """All items of an evaluation.

    Attributes:
        task: the task as evaluated.
        lengths: items of each length, by number of input tokens, or by the length of the longest
            problems for a task on symbols.
        bos: whether items begin with BOS.
        vocab_size: number of ids of the tokenizer.
        unit: (n,) the haystack of each item, or without haystacks the item itself; `unit_kind`
            names which.
        depth: (n,) index of the item's depth in `depths`; empty on symbols.
    """

    task: Task
    lengths: dict[int, DrawnLength]
    bos: bool
    vocab_size: int
    unit: np.ndarray
    unit_kind: str = "item"
    unit_names: list[str] = field(default_factory=list)
    depth: np.ndarray = field(default_factory=NO_TEXT.copy)
    depths: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.unit)

    @property
    def in_text(self) -> bool:
        """Whether the task is in text: items have candidates to compare and a beginning that can be
        cut."""
        return not isinstance(self.task, SymbolTask)

    @property
    def candidates(self) -> int:
        first = next(iter(self.lengths.values()))
        return len(first.tokens.targets[0])

    @property
    def chance(self) -> float:
        """Accuracy of uniform guesses at the length where it is largest."""
        return max(drawn.chance for drawn in self.lengths.values())

    @property
    def hash(self) -> str:
        hashes = [drawn.hash for drawn in self.lengths.values()]
        return canonical_hash(hashes) if self.in_text else "-".join(each[:16] for each in hashes)


def draw_text(
    settings: TaskEvaluationSettings,
    task: Task,
    tokenizer: Tokenizer,
    *,
    bos: bool,
    trained_length: int,
    documents: Callable[[], Iterable[tuple[str, str]]] | None,
    origin: str = "",
) -> DrawnItems:
    """The items of a task in text.

    `documents()` yields (name, text) of the haystacks, for tasks that use them; `origin` labels
    their source. Item i is placed in haystack i mod H at depth (i + i div H) mod D, at every
    length, so that D rounds cover every depth in every haystack. Raises EvaluationError if a length
    is too short for an item, or no document is long enough.
    """
    lengths = settings.grid(trained_length)
    items = TaskItems(task, tokenizer, "evaluation", settings.seed)
    index = np.arange(settings.items)
    depths = list(np.linspace(0, 1, settings.depths)) if settings.depths > 1 else [0.5]
    unit = index
    kind = "item"
    names = [f"item {i}" for i in index]
    depth = index % len(depths)
    texts = [NO_TEXT] * len(index)
    bos_id = tokenizer.bos_id if bos else None
    drawn = {}
    try:
        if documents is not None and isinstance(task, HaystackTask):
            most = min(settings.haystacks, settings.items)
            haystacks = Haystacks(documents(), tokenizer, lengths[-1] + 1, most, origin)
            count = len(haystacks)
            unit = index % count
            kind = "haystack"
            names = haystacks.names
            depth = (index + index // count) % len(depths)
            texts = [haystacks.text(i, "evaluation", settings.seed, i) for i in unit.tolist()]
        for length in lengths:
            made = [
                items.item(int(i), length + 1 - int(bos), depths[depth[i]], texts[i]) for i in index
            ]
            rows = [[item.prompt, item.answer, item.others] for item in made]
            drawn[length] = DrawnLength(
                tokens=text_tokens(made, bos_id),
                inputs=length,
                positions=length,
                hash=canonical_hash([bos_id, length, rows]),
                chance=1 / (1 + len(made[0].others)),
            )
    except DataError as error:
        raise EvaluationError(str(error)) from error
    return DrawnItems(
        task=items.task,
        lengths=drawn,
        bos=bos_id is not None,
        vocab_size=tokenizer.vocab_size,
        unit=unit,
        unit_kind=kind,
        unit_names=names,
        depth=depth,
        depths=depths,
    )


def draw_symbols(
    settings: TaskEvaluationSettings,
    data: GeneratedData,
    positions: PlainPositions,
) -> DrawnItems:
    """The items of a task on symbols for a model trained on `data`, at the `positions` of its
    training if the settings select them.

    Raises EvaluationError for a length without problems, a vocabulary other than the one of `data`,
    or positions that do not reach the length.
    """
    trained = data.source
    task = settings.task or trained.task
    if not isinstance(task, SymbolTask) or task.alphabet != data.tokenizer.symbols:
        raise EvaluationError(
            f"task.name={task.name}: its symbols differ from those of the trained task "
            f"{trained.task.name}; change settings of that task only, such as task.ignore"
        )
    index = np.arange(settings.items)
    drawn_by = index if settings.positions == "redrawn" else np.zeros_like(index)
    positions = PLAIN if settings.positions is None else positions
    drawn = {}
    for shortest, longest in settings.ranges(trained.bounds):
        try:
            source = SymbolSource(task=task, lengths=(shortest, longest))
            items = replace(data, source=source).items("evaluation", settings.seed)
            positions.check(items.data.longest)
        except DataError as error:
            raise EvaluationError(f"lengths: {error}") from error
        except ValueError as error:
            raise EvaluationError(f"positions={settings.positions}: {error}") from error
        rows = items.rows(index)
        placed = rows.placed(positions, settings.seed, 0, drawn_by)
        arrays = [array for array in (*rows, placed.position) if array is not None]
        symbols = (rows.targets != IGNORED) & (rows.targets != SymbolTokenizer.eos_id)
        drawn[longest] = DrawnLength(
            tokens=symbol_tokens(rows, placed),
            inputs=rows.inputs.shape[1],
            positions=placed.position_end,
            hash=sha256_of(b"".join(array.tobytes() for array in arrays)),
            # the place of `<end>` is not guessed
            chance=float(np.mean(float(task.choices) ** -symbols.sum(axis=1))),
            shortest=shortest,
        )
    return DrawnItems(
        task=task,
        lengths=drawn,
        bos=data.bos,
        vocab_size=data.tokenizer.vocab_size,
        unit=index,
    )
