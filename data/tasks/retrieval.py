"""Tasks that hide facts in text: pass keys, sentences, chains of variables."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from data.tasks.items import Task, TaskItem, TaskRequest
from data.text_settings import StdlibSource, TextSettings

_ANIMALS = """
ant ape bat bear bee bird boar bug bull calf carp cat clam cod cow crab crow cub deer dog dove duck eel
elk emu ewe fawn flea fly foal fox frog goat gull hare hawk hen ibis jay kite kiwi lamb lark lion lynx
mole moth mouse mule newt orca owl ox panda pig pony puma ram rat rook seal shark sheep slug snail sow
stork swan tick toad trout tuna vole wasp whale wolf worm wren yak zebra
"""
_BUILDINGS = """
attic cellar garden kitchen barn tower chapel stable office hall library studio pantry garage closet
temple palace castle market harbour school prison museum cabin cottage forest meadow valley desert
island tunnel bridge station bakery theatre tavern church mill quarry orchard pasture canyon lagoon
hangar arcade saloon parlour nursery balcony basement courtyard workshop warehouse farm port bank shop
lodge vault shed crypt ferry
"""
NAMES = _ANIMALS.split()
PLACES = _BUILDINGS.split()


class HaystackTask(Task):
    """Base class of tasks with an answer that is hidden in text."""

    hides: ClassVar[bool] = True
    reads: ClassVar[bool] = True

    haystack: TextSettings = Field(StdlibSource(), description="source of the surrounding text")
    queries: int = Field(
        1, ge=1, description="maximum number of questions per training item; evaluation asks one"
    )

    def facts(self, request: TaskRequest, stem: str, values: list[str], count: int) -> TaskItem:
        """Hide `count` facts, each a stem with a name and one of `values`, and query the first of them.
        Values of no fact serve as wrong answers that are not in the context.
        """
        stems = [
            stem.format(NAMES[i]) for i in request.distinct("names", count, len(NAMES)).tolist()
        ]
        depths = request.draw("depths", count, 1001) / 1000
        depths[0] = request.depth
        parts = [(stems[i], f"{values[i]}.\n") for i in range(count)]
        statements = [(float(depth), *part) for depth, part in zip(depths, parts, strict=True)]
        return self.hide(request, statements, parts, [f"{value}.\n" for value in values[count:]])

    def hide(
        self,
        request: TaskRequest,
        statements: Sequence[tuple[float, str, str]],
        questions: Sequence[tuple[str, str]],
        invented: Sequence[str] = (),
    ) -> TaskItem:
        """Insert statements (depth, stem, value) into the haystack and append questions (stem, answer).

        The first question comes last and is scored. Its wrong answers are the answers of the other questions
        and `invented`. The first statement contains its answer.
        """
        last = request.encode(questions[0][0])
        answer, *others = [
            request.encode(right) for right in [*(right for _, right in questions), *invented]
        ]
        tokens = [request.encode(stem) + request.encode(value) for _, stem, value in statements]
        room = request.length - sum(map(len, tokens)) - len(last) - len(answer)
        if room < 0:
            raise request.too_short(request.length - room)
        earlier: list[int] = []
        for i in request.earlier_questions(self.queries, len(questions)):
            stem, right = questions[i]
            question = request.encode(stem) + request.encode(right)
            if len(question) > room:
                break
            earlier = earlier + question
            room = room - len(question)
        text = request.haystack[len(request.haystack) - room :]
        # Insert between two tokens, the second of which begins with white space, or at an end.
        cuts = np.array(
            [0, *(1 + np.flatnonzero(request.context.may_cut[text[1:]])).tolist(), room]
        )
        at = [int(cuts[np.abs(cuts - depth * room).argmin()]) for depth, *_ in statements]
        prompt = []
        starts = {}
        done = 0
        for i in sorted(range(len(statements)), key=lambda i: (at[i], statements[i][0], i)):
            prompt += text[done : at[i]].tolist()
            starts[i], done = len(prompt), at[i]
            prompt += tokens[i]
        prompt += text[done:].tolist() + earlier + last
        value_at = starts[0] + len(request.encode(statements[0][1]))
        return TaskItem(
            prompt, answer, others, at[0] / room if room else request.depth, len(prompt) - value_at
        )


class PasskeyTask(HaystackTask):
    """Numbers hidden in text, each with a name. One of them is queried; the others are the wrong answers.
    With one key, as in Mohtashami and Jaggi 2023 (arXiv:2305.16300), the wrong answers are not in the text.
    `Key heron 48213`; `Key heron` → ` 48213`"""

    name: Literal["passkey"] = "passkey"
    keys: int = Field(
        3, ge=1, le=64, description="pass keys per item; with several, chance is 1/keys"
    )
    choices: int = Field(
        4,
        ge=2,
        le=64,
        description="number of values compared if there is one key; chance is 1/choices",
    )
    digits: int = Field(5, ge=1, le=18, description="digits per pass key")

    def make(self, request: TaskRequest) -> TaskItem:
        compared = self.keys if self.keys > 1 else self.choices
        values = request.numbers("values", self.digits, compared, used=self.keys)
        return self.facts(request, "\nKey {}", values[:compared], self.keys)


class NeedleTask(HaystackTask):
    """Sentences hidden in text that state where an animal hid something. One of them is queried; the others
    are the wrong answers. After Kamradt 2023 and RULER's multi-key needle (arXiv:2404.06654).
    `heron hid it in the attic`; `heron hid it in the` → ` attic`"""

    name: Literal["needle"] = "needle"
    keys: int = Field(3, ge=2, le=16, description="facts per item; chance is 1/keys")

    def make(self, request: TaskRequest) -> TaskItem:
        places = [
            f" {PLACES[i]}" for i in request.distinct("values", len(PLACES), len(PLACES)).tolist()
        ]
        return self.facts(
            request,
            "\n{} hid it in the",
            request.same_count(places, self.keys)[: self.keys],
            self.keys,
        )


class VariablesTask(HaystackTask):
    """Chains of assignments hidden in text. The value of the last variable of one chain is queried; the
    values of the other chains are the wrong answers. RULER's variable tracking (arXiv:2404.06654).
    `x4 = 531`, later `q7 = x4`; `q7 =` → ` 531`"""

    name: Literal["variables"] = "variables"
    chains: int = Field(2, ge=2, le=16, description="chains per item; chance is 1/chains")
    hops: int = Field(
        1, ge=0, le=16, description="assignments from variable to variable in a chain"
    )
    digits: int = Field(3, ge=1, le=18, description="digits per value")

    def make(self, request: TaskRequest) -> TaskItem:
        links = self.hops + 1
        values = request.numbers("values", self.digits, self.chains)
        numbers = request.distinct("names", self.chains * links, 26 * 10).tolist()
        names = [f"{chr(97 + n // 10)}{n % 10}" for n in numbers]
        statements = []
        questions = []
        for chain in range(self.chains):
            own = names[chain * links : (chain + 1) * links]
            first = (
                request.depth
                if chain == 0
                else float(request.draw(f"depth {chain}", 1, 1001)[0]) / 1000
            )
            later = np.sort(request.draw(f"links {chain}", self.hops, 1001)) / 1000
            depths = [first, *(first + (1 - first) * later).tolist()]
            rights = [values[chain], *(f" {name}" for name in own[:-1])]
            for depth, name, right in zip(depths, own, rights, strict=True):
                statements.append((depth, f"\n{name} =", f"{right}\n"))
            questions.append((f"\n{own[-1]} =", f"{values[chain]}\n"))
        return self.hide(request, statements, questions)
