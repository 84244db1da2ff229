"""The door: where tokens stand, what a pass looks like, and what a positional scheme may do.

Order is known to the model through this file alone. A scheme may touch a token (`embed`), a query or key
(`Plan.read`, `Plan.write`) or a pair (a rule or bias given to `Span.pairs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from model.errors import ModelError
from model.kernels import Band, Bias, Distance, Pairs, Rule, View

LAYOUTS = ("plain", "ragged", "packed")


@dataclass(frozen=True)
class Places:
    """Where each token of a pass stands. Made by the loader or the sampler, never rebuilt in a layer.

    Attributes:
        order: (B, T) int; index of the token in its document. It alone decides who sees whom.
        position: (B, T) int or real; what schemes see. It may skip, be random or fractional.
        document: (B, T) int; −1 is padding. Tokens see tokens of their own document only.
        layout: known on the host, never inferred from the tensors. ``plain``: one document a row, order
            rising by one and equal in all rows; ``ragged``: one document a row behind left padding;
            ``packed``: several documents a row.
        reach: 1 + the largest position, on the host; tables are sized and bounds checked by it.
        lengths: declared total length of each row, or one number for all; rules whose frequencies follow
            the length take it from here, once per sequence.
        unit_steps: in plain layout, positions rise by one from token to token, in all rows.

    The tensors may have one row that stands for all (1, T).
    """

    order: Tensor
    position: Tensor
    document: Tensor
    layout: str
    reach: int
    lengths: tuple[int, ...]
    unit_steps: bool = True

    @classmethod
    def plain(
        cls, tokens: int, *, offset: int = 0, length: int | None = None, device: torch.device | str = "cpu"
    ) -> Places:
        """Rows of `tokens` tokens at positions offset, offset + 1, ...; `length` defaults to their end."""
        order = torch.arange(offset, offset + tokens, device=device)[None]
        end = offset + tokens
        return cls(order, order, torch.zeros_like(order), "plain", end, (max(length or 0, end),))

    @classmethod
    def left_padded(
        cls,
        counts: list[int],
        tokens: int,
        *,
        offset: int = 0,
        lengths: list[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Places:
        """Rows of `tokens` slots that end together; row r holds counts[r] tokens at its right end.

        Later tokens of the same rows are described by tokens=1, offset=slots filled so far: slot s of row r
        then has order s − padding(r). `counts` and the padding stay those of the first pass, whose width is
        max(counts).
        """
        width = max(counts)
        if tokens + offset < width:
            raise ModelError(f"left padding needs at least {width} slots for {width} tokens, got {tokens}")
        padding = torch.tensor([width - c for c in counts], device=device)[:, None]  # (B, 1)
        order = torch.arange(offset, offset + tokens, device=device)[None] - padding  # (B, T)
        document = torch.where(order < 0, -1, 0)
        ends = [offset + tokens - (width - c) for c in counts]
        declared = tuple(max(a, b) for a, b in zip(ends, lengths or ends, strict=True))
        return cls(order, order.clamp(min=0), document, "ragged", offset + tokens, declared)

    def last(self, count: int) -> Places:
        """The last `count` tokens."""
        start = self.order.shape[1] - count
        return replace(
            self,
            order=self.order[:, start:],
            position=self.position[:, start:],
            document=self.document[:, start:],
        )


@dataclass(frozen=True)
class Span:
    """One pass of one layer kind: the new tokens, which of them ask, and every key they may ask about.

    Attributes:
        new: the tokens of this pass; their keys are written.
        queries: the tokens whose outputs are wanted: the last of `new`.
        keys: every key, those of this pass last.
        tables: what the scheme's `tables` returned for `new`.
        window: a key is seen only if it is fewer than this many tokens back, the query itself included.
    """

    new: Places
    queries: Places
    keys: Places
    batch: int
    heads: int
    device: torch.device
    tables: tuple[Tensor, ...] = ()
    window: int | None = None

    def of_queries(self, x: Tensor, dim: int = 1) -> Tensor:
        """The rows of a per-new-token tensor that belong to the queries."""
        count = self.queries.order.shape[1]
        return x.narrow(dim, x.shape[dim] - count, count)

    def visible(self) -> Rule:
        """Causal, within the document, within the window: by order and document, never by tensor index.

        In plain layout order rises by one along the keys, so that index and order differ by a constant and
        the comparison of indices is the comparison of orders.
        """
        window = self.window
        if self.queries.layout == "plain":
            offset = self.keys.order.shape[1] - self.queries.order.shape[1]

            def plain(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                seen = j <= i + offset
                return seen if window is None else seen & (i + offset - j < window)

            return plain
        q_order, q_document = self._rows(self.queries.order), self._rows(self.queries.document)
        k_order, k_document = self._rows(self.keys.order), self._rows(self.keys.document)

        def ordered(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            back = q_order[b, i] - k_order[b, j]
            seen = (back >= 0) & (q_document[b, i] == k_document[b, j])
            return seen if window is None else seen & (back < window)

        return ordered

    def pairs(
        self, rule: Rule | None = None, bias: Bias | None = None, distance: Distance | None = None
    ) -> Pairs:
        """The visible pairs, narrowed by `rule`, with `bias` or with a bias of distance alone.

        Args:
            rule: elementwise over indices; a pair is kept where it holds.
            bias: elementwise over indices; added to the logit after the 1/√D scale.
            distance: elementwise over (head, position distance), in place of `bias`.
        """
        visible, plain = self.visible(), self.queries.layout == "plain"
        both = visible if rule is None else lambda b, h, i, j: visible(b, h, i, j) & rule(b, h, i, j)
        queries, keys = self.queries.order.shape[1], self.keys.order.shape[1]
        if distance is not None:
            q_position, k_position = self._rows(self.queries.position), self._rows(self.keys.position)

            def of_distance(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return distance(h, q_position[b, i] - k_position[b, j])

            bias = of_distance

        return Pairs(
            batch=self.batch,
            heads=self.heads,
            queries=queries,
            keys=keys,
            device=self.device,
            rule=both,
            bias=bias,
            band=Band(keys - queries, self.window) if plain and rule is None else None,
            distance=distance if plain and self.keys.unit_steps else None,
        )

    def _rows(self, x: Tensor) -> Tensor:
        return x.expand(self.batch, -1)


@dataclass(frozen=True)
class Plan:
    """One scheme's treatment of one pass of one layer kind.

    read(q, k) gives the views in which queries (B, H, T, D) meet remembered keys (B, G, S, D);
    write(k) gives the form (B, G, T, D) in which the new keys are remembered.
    """

    read: Callable[[Tensor, Tensor], list[View]]
    write: Callable[[Tensor], Tensor] = field(default=lambda k: k)


@dataclass(frozen=True)
class Geometry:
    """What a scheme may know of the model around it."""

    dim: int
    heads: int
    head_dim: int
    train_length: int
    original_length: int


class PositionSettings(BaseModel):
    """Settings every scheme has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Fields that a trained checkpoint may be evaluated under without having been trained with them.
    test_time: ClassVar[frozenset[str]] = frozenset({"window"})

    name: str
    window: int | None = Field(
        None, ge=1, description="a query sees only this many latest keys, its own included; null: all"
    )


class Position(nn.Module):
    """A positional scheme. This class itself is NoPE: it does nothing, the causal mask alone gives order.

    Kazemnejad et al. 2023 (arXiv:2305.19466); Haviv et al. 2022 (arXiv:2203.16634).
    """

    def __init__(self, settings: PositionSettings, geometry: Geometry):
        super().__init__()
        self.settings = settings
        self.geometry = geometry

    @property
    def limit(self) -> int | None:
        """One past the last position this scheme can represent; None where there is no end."""
        return None

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

    def plan(self, span: Span) -> Plan:
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
