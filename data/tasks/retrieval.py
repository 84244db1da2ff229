"""Tasks in text: hidden pass keys, sentences and chains of variables, and associative recall; and
the text around hidden facts."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from data.random_draws import NamedDraws, hash64
from data.tasks.task import Task, TaskItem, TaskRequest, answer_mask
from data.text_settings import StdlibSource, TextSettings
from data.tokenizers import Tokenizer
from errors import DataError
from settings.fields import setting

_ANIMALS = """
ant ape bat bear bee bird boar bug bull calf carp cat clam cod cow crab crow cub deer dog dove
duck eel elk emu ewe fawn flea fly foal fox frog goat gull hare hawk hen ibis jay kite kiwi lamb
lark lion lynx mole moth mouse mule newt orca owl ox panda pig pony puma ram rat rook seal shark
sheep slug snail sow stork swan tick toad trout tuna vole wasp whale wolf worm wren yak zebra
"""
_BUILDINGS = """
attic cellar garden kitchen barn tower chapel stable office hall library studio pantry garage
closet temple palace castle market harbour school prison museum cabin cottage forest meadow valley
desert island tunnel bridge station bakery theatre tavern church mill quarry orchard pasture
canyon lagoon hangar arcade saloon parlour nursery balcony basement courtyard workshop warehouse
farm port bank shop lodge vault shed crypt ferry
"""
NAMES = _ANIMALS.split()
PLACES = _BUILDINGS.split()
BEYOND = 1 << 12  # tokens kept per document beyond `longest`, to vary the start
# letters per token, an estimated maximum; limits how much of a document is encoded first
LETTERS = 8
# residues modulo 5 that assign documents by name
SIDES = {"training": (1, 2, 3, 4), "evaluation": (0,)}


class Statement(NamedTuple):
    """A hidden fact: a stem such as `Key heron`, its value, and the depth of both in the text."""

    depth: float
    stem: str
    value: str


class TextTask(Task):
    """Base class of tasks in text."""

    key = "task"

    queries: int = setting(
        1,
        "maximum number of questions per training item; evaluation asks one, because earlier "
        "questions could contain its answer",
        ge=1,
    )

    def scored(self):
        return self.model_copy(update={"queries": 1})

    def earlier_questions(self, request: TaskRequest, count: int) -> list[int]:
        """Which of `count` questions are asked, with their answers, before the last one."""
        asked = request.draws.one("asked", self.queries)
        return request.draws.below("earlier", asked, count)

    def too_short(self, length: int, least: int) -> DataError:
        return DataError(
            f"an item of {length} tokens is too short for the task {self.name}: with this "
            f"tokenizer it needs at least {least}; increase the length or make the task smaller"
        )


class HaystackTask(TextTask):
    """Base class of tasks with an answer that is hidden in text."""

    haystack: TextSettings = setting(StdlibSource(), "source of the surrounding text")

    def facts(self, request: TaskRequest, stem: str, values: list[str], count: int) -> TaskItem:
        """Hide `count` facts, each a stem with a name and one of `values`, and query the first of
        them. Values of no fact serve as wrong answers that are not in the context.
        """
        names = request.draws.distinct("names", count, len(NAMES))
        depths = request.draws.below("depths", count, 1001)
        facts = []
        for i in range(count):
            depth = depths[i] / 1000 if i else request.depth
            facts.append(Statement(depth, stem.format(NAMES[names[i]]), f"{values[i]}.\n"))
        invented = [f"{value}.\n" for value in values[count:]]
        questions = [(fact.stem, fact.value) for fact in facts]
        return self.hide(request, facts, questions, invented)

    def hide(
        self,
        request: TaskRequest,
        statements: Sequence[Statement],
        questions: Sequence[tuple[str, str]],
        invented: Sequence[str] = (),
    ) -> TaskItem:
        """Insert statements into the haystack and append questions (stem, answer).

        The first question comes last and is scored. Its wrong answers are the answers of the other
        questions and `invented`. The first statement contains its answer.
        """
        last = request.encode(questions[0][0])
        answers = [right for _, right in questions]
        answer, *others = [request.encode(text) for text in (*answers, *invented)]
        tokens = []
        for statement in statements:
            tokens.append(request.encode(statement.stem) + request.encode(statement.value))
        room = request.length - sum(map(len, tokens)) - len(last) - len(answer)
        if room < 0:
            raise self.too_short(request.length, request.length - room)
        earlier: list[int] = []
        for i in self.earlier_questions(request, len(questions)):
            stem, right = questions[i]
            question = request.encode(stem) + request.encode(right)
            if len(question) > room:
                break
            earlier += question
            room -= len(question)
        text = request.haystack[len(request.haystack) - room :]
        at = _insertion_points(request, text, [statement.depth for statement in statements])
        prompt: list[int] = []
        starts = {}
        done = 0
        order = sorted(range(len(statements)), key=lambda i: (at[i], statements[i].depth, i))
        for i in order:
            prompt += text[done : at[i]].tolist()
            done = at[i]
            starts[i] = len(prompt)
            prompt += tokens[i]
        prompt += text[done:].tolist() + earlier + last
        value_start = starts[0] + len(request.encode(statements[0].stem))
        return TaskItem(
            [*prompt, *answer],
            answer_mask(prompt, answer),
            others=others,
            distance=len(prompt) - value_start,
        )


def _insertion_points(request: TaskRequest, text: np.ndarray, depths: list[float]) -> list[int]:
    """Offsets in the text near the depths: before a token that begins with white space, or an end
    of the text."""
    inside = 1 + np.flatnonzero(request.items.may_cut[text[1:]])
    cuts = np.array([0, *inside.tolist(), len(text)])
    nearest = [np.abs(cuts - depth * len(text)).argmin() for depth in depths]
    return cuts[nearest].tolist()


class PasskeyTask(HaystackTask):
    """Numbers hidden in text, each with a name. One of them is queried; the others are the wrong
    answers. With one key, as in Mohtashami and Jaggi 2023 (arXiv:2305.16300), the wrong answers are
    not in the text. `Key heron 48213`; `Key heron` → ` 48213`"""

    name: Literal["passkey"] = "passkey"
    keys: int = setting(3, "pass keys per item; with several, chance is 1/keys", ge=1, le=64)
    choices: int = setting(
        4,
        "number of values compared if there is one key; chance is 1/choices",
        ge=2,
        le=64,
    )
    digits: int = setting(5, "digits per pass key", ge=1, le=18)

    def make(self, request):
        compared = self.keys if self.keys > 1 else self.choices
        values = request.numbers(self.digits, compared, used=self.keys)
        return self.facts(request, "\nKey {}", values[:compared], self.keys)


class NeedleTask(HaystackTask):
    """Sentences hidden in text that state where an animal hid something. One of them is queried;
    the others are the wrong answers. After Kamradt 2023 and RULER's multi-key needle
    (arXiv:2404.06654). `heron hid it in the attic`; `heron hid it in the` → ` attic`"""

    name: Literal["needle"] = "needle"
    keys: int = setting(3, "facts per item; chance is 1/keys", ge=2, le=16)

    def make(self, request):
        order = request.draws.distinct("values", len(PLACES), len(PLACES))
        places = request.same_count([f" {PLACES[i]}" for i in order], self.keys)
        return self.facts(request, "\n{} hid it in the", places[: self.keys], self.keys)


class VariablesTask(HaystackTask):
    """Chains of assignments hidden in text. The value of the last variable of one chain is queried;
    the values of the other chains are the wrong answers. RULER's variable tracking
    (arXiv:2404.06654). `x4 = 531`, later `q7 = x4`; `q7 =` → ` 531`"""

    name: Literal["variables"] = "variables"
    chains: int = setting(2, "chains per item; chance is 1/chains", ge=2, le=16)
    hops: int = setting(1, "assignments from variable to variable in a chain", ge=0, le=15)
    digits: int = setting(3, "digits per value", ge=1, le=18)

    def make(self, request):
        links = self.hops + 1
        values = request.numbers(self.digits, self.chains)
        numbers = request.draws.distinct("names", self.chains * links, 26 * 10)
        names = [f"{chr(ord('a') + n // 10)}{n % 10}" for n in numbers]
        statements = []
        questions = []
        for chain, value in enumerate(values[: self.chains]):
            chain_names = names[chain * links : (chain + 1) * links]
            first = request.depth
            if chain:
                first = request.draws.one(f"depth {chain}", 1001) / 1000
            later = sorted(request.draws.below(f"links {chain}", self.hops, 1001))
            depth = first
            right = value
            for name, part in zip(chain_names, [*later, 0], strict=True):
                statements.append(Statement(depth, f"\n{name} =", f"{right}\n"))
                depth = first + (1 - first) * (part / 1000)
                right = f" {name}"
            questions.append((f"\n{chain_names[-1]} =", f"{value}\n"))
        return self.hide(request, statements, questions)


class RecallTask(TextTask):
    """Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927): as many key-value pairs
    as fit, then a key, whose value is the answer. `ab 42` and more pairs, one per line; `ab` → `
    42`"""

    name: Literal["recall"] = "recall"
    letters: int = setting(2, "letters per key; the keys of an item are distinct", ge=1, le=4)
    digits: int = setting(2, "digits per value", ge=1, le=9)
    choices: int = setting(4, "number of values compared; chance is 1/choices", ge=2, le=64)

    def make(self, request):
        most = 26**self.letters
        fewest = min(self.choices, most)  # pairs of an item
        wanted = min(most, max(request.length, fewest))
        numbers = request.draws.distinct("keys", wanted, most)
        keys = [self._spelled(number) for number in numbers]
        values = request.numbers(self.digits, self.choices)
        # The first pairs have distinct values, the choices. They are in the item at every length.
        drawn = request.draws.below("picks", len(keys), len(values))
        pairs = []
        # there are more values than keys
        for key, i in zip(keys, [*range(self.choices), *drawn], strict=False):
            pairs.append(request.encode(key) + request.encode(f"{values[i]}\n"))
        asked = [0, *self.earlier_questions(request, fewest)]
        room = request.length - sum(len(pairs[i]) for i in asked)
        sizes = np.cumsum([len(pair) for pair in pairs])
        count = int(np.searchsorted(sizes, room, side="right"))
        if count < fewest:
            least = request.length - room + int(sizes[fewest - 1])
            raise self.too_short(request.length, least)
        if count == most:
            raise DataError(
                f"an item of {request.length} tokens requires more than the {most:,} keys of "
                f"{self.letters} letters; increase letters"
            )
        order = [1 + i for i in request.draws.distinct("order", count - 1, count - 1)]
        place = round(request.depth * (count - 1))
        order.insert(place, 0)  # the pair whose value is the answer
        start = sum(len(pairs[i]) for i in order[:place])
        question = request.encode(keys[0])
        prompt = []
        for i in [*order, *asked[1:]]:
            prompt += pairs[i]
        prompt += question
        answer, *others = [request.encode(f"{value}\n") for value in values[: self.choices]]
        return TaskItem(
            [*prompt, *answer],
            answer_mask(prompt, answer),
            others=others,
            distance=len(prompt) - start - len(question),
        )

    def _spelled(self, number: int) -> str:
        """A number as letters, the last digit to base 26 first."""
        digits = [number // 26**place % 26 for place in range(self.letters)]
        return "".join(chr(ord("a") + digit) for digit in digits)


def is_for(name: str, purpose: str) -> bool:
    """Whether items for `purpose` may use the document of this name."""
    return hash64(f"haystack {name}") % 5 in SIDES[purpose]


class Haystacks:
    """Documents, as tokens, that are long enough for hidden facts.

    Args:
        documents: (name, text) of each document, in order.
        tokenizer: encodes the documents.
        longest: minimum tokens per document; shorter ones are skipped.
        count: maximum number of documents. The first ones that are long enough are used.
        origin: name of the documents' source, for messages.

    Raises:
        DataError: no document is long enough. The message reports the number of documents and the
            longest usable length.
    """

    def __init__(
        self,
        documents: Iterable[tuple[str, str]],
        tokenizer: Tokenizer,
        longest: int,
        count: int,
        origin: str,
    ):
        self.names: list[str] = []
        self.tokens: list[np.ndarray] = []
        seen = 0
        most = 0
        for name, text in documents:
            seen += 1
            if len(text.encode()) < longest:  # a token has at least one byte
                most = max(most, len(text.encode()))
                continue
            tokens = tokenizer.encode(text[: LETTERS * (longest + BEYOND)])
            if len(tokens) < longest:
                tokens = tokenizer.encode(text)
            most = max(most, len(tokens))
            if len(tokens) >= longest:
                self.names.append(name)
                self.tokens.append(np.array(tokens[: longest + BEYOND], dtype=np.int32))
            if len(self.tokens) == count:
                break
        if not self.tokens:
            raise DataError(
                f"none of the {seen:,} documents of {origin} has {longest:,} tokens; the longest "
                f"has {most:,}. Decrease the length of the items or use another haystack"
            )
        self.longest = longest

    def __len__(self) -> int:
        return len(self.tokens)

    def text(self, which: int, *key: int | str) -> np.ndarray:
        """Return `longest` tokens of document `which`, from a start that `key` selects."""
        tokens = self.tokens[which]
        draws = NamedDraws("haystack", *key[:-1])
        start = draws.one(key[-1], len(tokens) - self.longest + 1)
        return tokens[start : start + self.longest]
