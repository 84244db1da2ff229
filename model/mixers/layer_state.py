"""The cache of a recurrent layer: the state S and the last inputs of its convolution.

Its size does not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.sharding import GatheredLayer, ShardedWindow
from model.mixers.recurrence import (
    Inputs,
    RecurrentState,
    Transition,
    chunks_of,
    step_by_step,
    without_padding,
)


class LayerState:
    """State of one layer after the tokens of earlier passes; tensors are updated in place."""

    def __init__(self):
        self._stored: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}  # copies, of a static cache

    def extend(
        self,
        x: Tensor,
        document: Tensor | None,
        count: int,
    ) -> tuple[Tensor, Tensor | None]:
        """The inputs x (B, T, C) of a convolution and the documents (B or 1, T) of this pass, after
        those of the last `count` tokens of earlier passes."""
        last = self._stored.get("inputs")
        if last is None:
            last = x.new_zeros(len(x), count, x.shape[2])
        inputs = torch.cat([last, x], dim=1)
        self._store("inputs", inputs[:, inputs.shape[1] - count :])
        if document is None:
            return inputs, None
        earlier = self._stored.get("documents")
        if earlier is None:
            earlier = document.new_full((len(document), count), -1)
        documents = torch.cat([earlier, document], dim=1)
        self._store("documents", documents[:, documents.shape[1] - count :])
        return inputs, documents

    @property
    def document(self) -> Tensor | None:
        """(B or 1, 1) document of the last token; None: there is none, or only one."""
        return self._stored.get("document")

    @property
    def last(self) -> RecurrentState | None:
        """The state after the last token; None before the first pass."""
        memory = self._stored.get("memory")
        return None if memory is None else RecurrentState(memory, self.document)

    def before(self, whole: Callable[[], Transition]) -> RecurrentState | None:
        """The state before this pass; `whole` computes the transition of its tokens."""
        return self.last

    def keep(self, state: RecurrentState) -> None:
        """Store the state after this pass."""
        self._store("memory", state.memory)
        if state.document is not None:
            self._store("document", state.document)

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order; tensors that apply to all rows stay."""
        for name, x in self._stored.items():
            if len(x) > 1 or name in ("memory", "inputs"):
                self._stored[name] = x.index_select(0, rows.to(x.device))

    def static(self, index: object) -> LayerState:
        """The cache of passes of one token, which compare documents: this one, whose tensors stay
        at their addresses."""
        x = self._stored.get("inputs")
        if x is not None and "documents" not in self._stored:
            self._stored["documents"] = x.new_zeros(1, x.shape[1], dtype=torch.int64)
        memory = self._stored.get("memory")
        if memory is not None and "document" not in self._stored:
            self._stored["document"] = memory.new_zeros(1, 1, dtype=torch.int64)
        self._first = {name: x.clone() for name, x in self._stored.items()}
        return self

    def restart(self) -> None:
        """Undo all passes of a static cache."""
        for name, x in self._first.items():
            self._stored[name].copy_(x)

    def _store(self, name: str, x: Tensor) -> None:
        stored = self._stored.get(name)
        if stored is None or stored.shape != x.shape:
            self._stored[name] = x.clone()
        else:
            stored.copy_(x)


class GatheredState(GatheredLayer):
    """State of one layer over a window that is sharded over processes; see `LayerState`.

    All ranks gather the transitions of all chunks of a pass and apply them in order. With the delta
    rule that is K·K + K·V numbers per head and chunk, otherwise K + K·V.
    """

    def __init__(self, window: ShardedWindow):
        super().__init__(window)
        self._inputs: Tensor | None = None  # the last inputs of earlier passes
        self._memory: Tensor | None = None  # after the chunks of earlier passes
        self._inputs_turn = 0
        self._memory_turn = 0

    def extend(
        self,
        x: Tensor,
        document: Tensor | None,
        count: int,
    ) -> tuple[Tensor, Tensor | None]:
        """See `LayerState.extend`."""
        turn = self._inputs_turn
        self._inputs_turn += 1
        own = F.pad(x, (0, 0, max(0, count - x.shape[1]), 0))
        tails = self._wait(self._start(own[:, own.shape[1] - count :], turn), turn)
        last = torch.zeros_like(tails[0]) if self._inputs is None else self._inputs
        before = [last]
        for tail, (start, stop) in zip(tails, self._bounds(turn), strict=True):
            new = min(count, stop - start)
            last = torch.cat([last, tail[:, count - new :]], dim=1)[:, new:]
            before.append(last)
        self._inputs = last
        # Of all chunks, also later ones: the backward pass of a gather must run on every rank.
        chunk = self.shard.chunks[turn]
        inputs = torch.cat([torch.stack(before)[chunk % self.shard.size], x], dim=1)
        if document is None:
            return inputs, None
        start, _ = self.window.bounds(chunk)
        earlier = self.window.positions.document[:, max(0, start - count) : start]
        earlier = F.pad(earlier, (count - earlier.shape[1], 0), value=-1)
        return inputs, torch.cat([earlier, document], dim=1)

    @property
    def document(self) -> Tensor | None:
        """See `LayerState.document`."""
        start, _ = self.window.bounds(self.shard.chunks[self._memory_turn])
        if self.window.positions.layout == "plain" or start == 0:
            return None
        return without_padding(self.window.positions.document[:, :start], None)[:, -1:]

    def before(self, whole: Callable[[], Transition]) -> RecurrentState | None:
        """See `LayerState.before`."""
        document = self.document
        turn = self._memory_turn
        self._memory_turn += 1
        own = whole()
        kept = self._wait(self._start(own.kept, turn), turn)
        written = self._wait(self._start(own.written, turn), turn)
        memory = torch.zeros_like(own.written) if self._memory is None else self._memory
        before = [memory]
        for parts in zip(kept, written, strict=True):
            before.append(Transition(*parts).apply(before[-1]))
        self._memory = before[-1]
        # Of all chunks; see `extend`.
        chunk = self.shard.chunks[turn]
        return RecurrentState(torch.stack(before)[chunk % self.shard.size], document)

    def keep(self, state: RecurrentState) -> None:
        """Later chunks do not use this state."""


def recurrent_outputs(
    inputs: Inputs, state: LayerState | GatheredState | None, chunk: int
) -> Tensor:
    """Outputs (B, H, T, V) of the recurrence after the tokens of earlier passes, which `state` has.

    Args:
        state: updated in place; None: there are no earlier tokens.
        chunk: tokens that are computed at once.
    """
    state = LayerState() if state is None else state
    if inputs.q.shape[2] == 1 and isinstance(state, LayerState):
        out, after = step_by_step(inputs, state.last)
    else:
        chunks = chunks_of(inputs, state.document, chunk)
        out, after = chunks.run(state.before(chunks.whole))
    state.keep(after)
    return out
