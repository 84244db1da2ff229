"""Where tokens stand: three numbers each, made by the loader or the sampler and never rebuilt in a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.errors import ModelError

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

    def first(self, count: int) -> Places:
        """The first `count` tokens."""
        return replace(
            self,
            order=self.order[:, :count],
            position=self.position[:, :count],
            document=self.document[:, :count],
        )

    def last(self, count: int) -> Places:
        """The last `count` tokens."""
        start = self.order.shape[1] - count
        return replace(
            self,
            order=self.order[:, start:],
            position=self.position[:, start:],
            document=self.document[:, start:],
        )
