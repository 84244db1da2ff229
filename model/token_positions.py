"""Order, position and document of each token, as tensors that are created once per pass. In
training, data/sampling/packing.py computes them (packing, and where positions start over at each
document), and data/sampling/position_samplers.py draws random positions. Decoding uses
`TokenPositions.plain` and `TokenPositions.left_padded`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from errors import ModelError


@dataclass(frozen=True)
class TokenPositions:
    """Order, position and document of each token of a pass.

    Attributes:
        order: (B, T) int; index of the token in its document. Determines the causal mask.
        position: (B, T) int or float; input of the positional scheme. May skip values or be
            fractional.
        document: (B, T) int; −1 is padding. Attention stays within a document.
        layout: set on the host. ``plain``: one document per row, order increases by one and is the
            same in all rows; ``ragged``: one document per row, left-padded; ``packed``: several
            documents per row.
        position_end: 1 + the largest position, on the host; used to size tables and check bounds.
        lengths: declared total length of each row, or one value for all rows. Used by schemes that
            depend on the sequence length.
        unit_steps: positions increase by one from token to token of a document in all rows; not
            read in ragged layout.

    Tensors of shape (1, T) apply to all rows.
    """

    order: Tensor
    position: Tensor
    document: Tensor
    layout: str
    position_end: int
    lengths: tuple[int, ...]
    unit_steps: bool = True

    @classmethod
    def plain(
        cls,
        tokens: int,
        *,
        offset: int = 0,
        length: int | None = None,
        device: torch.device | str = "cpu",
    ) -> TokenPositions:
        """Rows of `tokens` tokens at positions offset, offset + 1, ...; `length` is at least, and
        by default, the end of these positions."""
        order = torch.arange(offset, offset + tokens, device=device)[None]
        end = offset + tokens
        return cls(
            order,
            order,
            torch.zeros_like(order),
            "plain",
            end,
            (max(length or 0, end),),
        )

    @classmethod
    def left_padded(
        cls,
        counts: list[int],
        tokens: int,
        *,
        offset: int = 0,
        lengths: list[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> TokenPositions:
        """Left-padded rows of `tokens` columns; row r has counts[r] tokens.

        For the next tokens of the same rows, pass tokens=1 and offset=columns so far: column s of
        row r has order s − padding(r). `counts` stay those of the first pass, whose width is
        max(counts).
        """
        width = max(counts)
        if tokens + offset < width:
            raise ModelError(
                f"a row has {width} tokens, and left padding has {tokens + offset} columns: pass "
                f"tokens + offset of at least {width}"
            )
        padding = torch.tensor([width - c for c in counts], device=device)[:, None]  # (B, 1)
        order = torch.arange(offset, offset + tokens, device=device)[None] - padding  # (B, T)
        document = torch.where(order < 0, -1, 0)
        ends = [offset + tokens - (width - c) for c in counts]
        declared = tuple(max(a, b) for a, b in zip(ends, lengths or ends, strict=True))
        return cls(
            order,
            order.clamp(min=0),
            document,
            "ragged",
            offset + tokens,
            declared,
        )

    @classmethod
    def of_rows(cls, placed: Any, rows: Any, length: int) -> TokenPositions:
        """The positions of some rows of a batch, as CPU tensors, from NumPy arrays.

        Args:
            placed: has the attributes of this class, as NumPy arrays of all rows, or of one row
                that applies to all.
            rows: a slice or indices.
            length: declared length of every row.
        """
        order, position, document = (
            torch.tensor(x if len(x) == 1 else x[rows])
            for x in (placed.order, placed.position, placed.document)
        )
        return cls(
            order,
            position,
            document,
            placed.layout,
            placed.position_end,
            (length,),
            placed.unit_steps,
        )

    @property
    def count(self) -> int:
        """T, the number of tokens of each row."""
        return self.order.shape[1]

    @property
    def device(self) -> torch.device:
        return self.order.device

    def map(self, function: Callable[[Tensor], Tensor], **changes) -> TokenPositions:
        """Apply a function to order, position and document; `changes` are new values of other
        attributes."""
        order = function(self.order)
        # Often the same tensor; the cache joins it once then.
        position = order if self.position is self.order else function(self.position)
        return replace(
            self,
            order=order,
            position=position,
            document=function(self.document),
            **changes,
        )

    def part(self, start: int, stop: int, **changes) -> TokenPositions:
        """The tokens start, ..., stop − 1."""
        return self.map(lambda x: x[:, start:stop], **changes)

    def last(self, count: int) -> TokenPositions:
        """The last `count` tokens."""
        return self.part(self.count - count, self.count)
