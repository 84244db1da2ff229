"""The door: where tokens stand, what a pass looks like, and what a positional scheme may do.

Order is known to the model through this file alone. A scheme may touch a token (`embed`), a query or key
(`Plan.read`, `Plan.write`) or a pair (a rule or bias given to `Span.pairs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from model.errors import ModelError
from model.kernels import lower_ahead
from model.pairs import Band, Bias, Distance, Pairs, Rule, View
from model.position.places import Places
from model.position.temperature import AnyTemperature, NoTemperature


@dataclass(frozen=True)
class Span:
    """One pass of one layer kind: the new tokens, which of them ask, and every key they may ask about.

    Attributes:
        new: the tokens of this pass; their keys are written.
        queries: the tokens whose outputs are wanted: the last of `new`.
        keys: every key that is still remembered, those of this pass last.
        tables: what the scheme's `tables` returned for `new`.
        window: a key is seen only if it is fewer than this many tokens back, the query itself included ...
        sinks: ... or if it is among the first so many of its document.
        ahead: what layers share is made before the first of them asks.
    """

    new: Places
    queries: Places
    keys: Places
    batch: int
    heads: int
    device: torch.device
    tables: tuple[Tensor, ...] = ()
    window: int | None = None
    sinks: int = 0
    ahead: bool = False

    def of_queries(self, x: Tensor, dim: int = 1) -> Tensor:
        """The rows of a per-new-token (or per-key) tensor that belong to the queries."""
        count = self.queries.order.shape[1]
        return x.narrow(dim, x.shape[dim] - count, count)

    # What rules and biases index: (B, T) of the queries and (B, S) of the keys.
    @property
    def q_order(self) -> Tensor:
        return self._rows(self.queries.order)

    @property
    def k_order(self) -> Tensor:
        return self._rows(self.keys.order)

    @property
    def q_position(self) -> Tensor:
        return self._rows(self.queries.position)

    @property
    def k_position(self) -> Tensor:
        return self._rows(self.keys.position)

    def visible(self) -> Rule:
        """Causal, within the document, within the window: by order and document, never by tensor index.

        In plain layout order rises by one along the keys (behind those kept as sinks), so that index and
        order differ by a constant and the comparison of indices is the comparison of orders.
        """
        window, sinks, k_order = self.window, self.sinks, self.k_order
        if self.queries.layout == "plain":
            offset = self.keys.order.shape[1] - self.queries.order.shape[1]

            def plain(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                seen = j <= i + offset
                if window is None:
                    return seen
                near = i + offset - j < window
                return seen & (near | (k_order[b, j] < sinks) if sinks else near)

            return plain
        q_order, q_document = self.q_order, self._rows(self.queries.document)
        k_document = self._rows(self.keys.document)

        def ordered(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            back = q_order[b, i] - k_order[b, j]
            seen = (back >= 0) & (q_document[b, i] == k_document[b, j])
            if window is None:
                return seen
            near = back < window
            return seen & (near | (k_order[b, j] < sinks) if sinks else near)

        return ordered

    def pairs(
        self,
        rule: Rule | None = None,
        bias: Bias | None = None,
        distance: Distance | None = None,
        by_row: bool = False,
    ) -> Pairs:
        """The visible pairs, narrowed by `rule`, with `bias` or with a bias of distance alone.

        Args:
            rule: elementwise over indices; a pair is kept where it holds. It may not differ between heads.
            bias: elementwise over indices; added to the logit after the 1/√D scale.
            distance: elementwise over (head, position distance), in place of `bias`.
            by_row: `rule` or `bias` differ between rows though places do not: they read content.
        """
        visible, plain = self.visible(), self.queries.layout == "plain"
        both = visible if rule is None else lambda b, h, i, j: visible(b, h, i, j) & rule(b, h, i, j)
        queries, keys = self.queries.order.shape[1], self.keys.order.shape[1]
        q_position, k_position = self.q_position, self.k_position

        def separation(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return q_position[b, i] - k_position[b, j]

        if distance is not None:

            def of_distance(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return distance(h, separation(b, i, j))

            bias = of_distance
        single = self.queries.position.shape[0] == self.keys.position.shape[0] == 1
        pairs = Pairs(
            batch=self.batch,
            heads=self.heads,
            queries=queries,
            keys=keys,
            device=self.device,
            rule=both,
            separation=separation,
            bias=bias,
            band=Band(keys - queries, self.window, self.sinks) if plain else None,
            is_band=plain and rule is None,
            distance=distance if plain and self.keys.unit_steps else None,
            rows=1 if plain and not by_row and (single or (bias is None and rule is None)) else self.batch,
        )
        if self.ahead:
            lower_ahead(pairs)
        return pairs

    def _rows(self, x: Tensor) -> Tensor:
        return x.expand(self.batch, -1)


class Remembering(Protocol):
    """What a layer's memory offers to a plan that notes things beside keys."""

    def notes(self) -> Tensor | None: ...

    def append_notes(self, new: Tensor) -> Tensor: ...


Temper = Callable[[Tensor], Tensor]  # queries (B, H, T, D) → the same, scaled


@dataclass(frozen=True)
class Plan:
    """One scheme's treatment of one pass of one layer kind.

    read(q, k) gives the views in which queries (B, H, T, D) meet remembered keys (B, G, S, ·);
    write(k) gives the form (B, G, T, ·) in which the new keys (B, G, T, D) are remembered;
    sink is the logit (H,) of a column without a value, which takes weight away.
    """

    read: Callable[[Tensor, Tensor], list[View]]
    write: Callable[[Tensor], Tensor] = field(default=lambda k: k)
    sink: Tensor | None = None

    def bind(self, x: Tensor, memory: Remembering | None) -> Plan:
        """The plan once the layer's input x (B, T, C) is known."""
        return self

    def modified(self, temper: Temper | None, sink: Tensor | None) -> Plan:
        """With queries scaled and a sink added."""
        read = self.read
        tempered = read if temper is None else lambda q, k: read(temper(q), k)
        return replace(self, read=tempered, sink=sink)


@dataclass(frozen=True)
class ContentPlan:
    """The plan of a scheme that reads the layer's input: each new token leaves notes beside its key.

    note(x, past) maps the input x (B, T, C) and the notes of the keys remembered so far (B, S − T, E; None
    for none) to those of the new tokens (B, T, E);
    read(q, k, notes) and write(k, new notes) are a Plan's, with the notes of all keys and of the new ones.
    """

    note: Callable[[Tensor, Tensor | None], Tensor]
    read: Callable[[Tensor, Tensor, Tensor], list[View]]
    write: Callable[[Tensor, Tensor], Tensor] = field(default=lambda k, notes: k)
    sink: Tensor | None = None

    def bind(self, x: Tensor, memory: Remembering | None) -> Plan:
        past = None if memory is None else memory.notes()
        new = self.note(x, past)
        notes = new if memory is None else memory.append_notes(new)
        read, write = self.read, self.write
        return Plan(lambda q, k: read(q, k, notes), lambda k: write(k, new), self.sink)

    def modified(self, temper: Temper | None, sink: Tensor | None) -> ContentPlan:
        read = self.read
        tempered = read if temper is None else lambda q, k, notes: read(temper(q), k, notes)
        return replace(self, read=tempered, sink=sink)


@dataclass(frozen=True)
class Geometry:
    """What a scheme may know of its model. `groups`: key/value heads, by default as many as heads."""

    dim: int
    heads: int
    head_dim: int
    train_length: int
    original_length: int
    groups: int | None = None

    @property
    def kv_heads(self) -> int:
        return self.groups or self.heads


class PositionSettings(BaseModel):
    """Settings every scheme has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Fields that a trained checkpoint may be evaluated under without having been trained with them.
    test_time: ClassVar[frozenset[str]] = frozenset({"window", "sinks", "temperature"})

    name: str
    window: int | None = Field(
        None, ge=1, description="a query sees only this many latest keys, its own included; null: all"
    )
    sinks: int = Field(
        0, ge=0, description="with a window: the first so many tokens of a document stay visible to all"
    )
    temperature: AnyTemperature = Field(NoTemperature(), description="a factor on the attention logits' q·k")
    sink_logit: Literal["none", "learned", "zero"] = Field(
        "none", description="a column without a value in each head's softmax: its logit is learned, or 0"
    )

    @model_validator(mode="after")
    def _sinks_need_a_window(self):
        if self.sinks and self.window is None:
            raise ValueError(
                f"sinks = {self.sinks} stay visible beside a window, and there is none: give window as well"
            )
        return self

    @property
    def per_layer(self) -> bool:
        """Whether each layer has an instance of the scheme, with parameters, of its own."""
        return False


class Position(nn.Module):
    """A positional scheme. This class itself is NoPE: it does nothing, the causal mask alone gives order.

    Kazemnejad et al. 2023 (arXiv:2305.19466); Haviv et al. 2022 (arXiv:2203.16634).
    """

    remembers: ClassVar[str] = "plain keys"  # the form in which a key is cached
    takes_fractions: ClassVar[bool] = True  # positions may be real numbers
    uses_position: ClassVar[bool] = True  # positions are read at all
    # Checks of the conformance suite that do not hold for this scheme, each with its reason.
    exempt: ClassVar[dict[str, str]] = {}

    def __init__(self, settings: PositionSettings, geometry: Geometry):
        super().__init__()
        self.settings = settings
        self.geometry = geometry

    @property
    def limit(self) -> int | None:
        """One past the last position this scheme can represent; None where there is no end."""
        return None

    @property
    def key_features(self) -> int:
        """Numbers that a remembered key takes in each key/value head."""
        return self.geometry.head_dim

    @property
    def follows_length(self) -> bool:
        """Whether the declared length of a sequence changes how its tokens are treated."""
        return False

    def initialise(self, generator: torch.Generator, embedding_std: float) -> None:
        """Draw the initial values of the scheme's own parameters; token embeddings have that deviation."""

    def tables(self, places: Places, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What the pass needs looked up, for the new tokens: first dimension B or 1, second T.

        Called eagerly, outside any compiled region: the place to grow tables, to resolve a factor that
        follows the declared length, and to refuse a position that does not exist.
        """
        return ()

    def embed(self, x: Tensor, tables: tuple[Tensor, ...], places: Places) -> Tensor:
        """Change the embedded tokens (B, T, C) before the first layer."""
        return x

    def plan(self, span: Span) -> Plan | ContentPlan:
        """How queries and keys are compared in this pass."""
        pairs = span.pairs()
        return Plan(read=lambda q, k: [View(q, k, pairs)])

    def check_reach(self, reach: int) -> None:
        """Refuse positions at or beyond the scheme's limit."""
        if self.limit is not None and reach > self.limit:
            raise ModelError(
                f"position scheme '{self.settings.name}' ends at position {self.limit - 1}, but offset + T = "
                f"{reach} positions were asked for: shorten the input to {self.limit} tokens"
            )
