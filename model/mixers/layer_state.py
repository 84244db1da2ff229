"""The cache of a recurrent layer: the state S and the last inputs of its convolution.

Its size does not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model.cache import CachedTail
from model.mixers.fla import IS_INSTALLED, fla_outputs
from model.mixers.recurrence import (
    Inputs,
    RecurrentState,
    Transition,
    chunks_of,
    step_by_step,
    without_padding,
)
from model.sharding import GatheredLayer, ShardedWindow


class LayerState(CachedTail):
    """State of one layer after the tokens of earlier passes."""

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

    def static(self) -> LayerState:
        """The cache of passes of one token, which compare documents: this one, whose tensors stay
        at their addresses."""
        memory = self._stored.get("memory")
        if memory is not None and "document" not in self._stored:
            self._stored["document"] = memory.new_zeros(1, 1, dtype=torch.int64)
        self.mark()
        return self


class GatheredState(GatheredLayer):
    """State of one layer over a window that is sharded over processes; see `LayerState`.

    All ranks gather the transitions of all chunks of a pass and apply them in order. With the delta
    rule that is K·K + K·V numbers per head and chunk, otherwise K + K·V.
    """

    def __init__(self, window: ShardedWindow):
        super().__init__(window)
        self._memory: Tensor | None = None  # after the chunks of earlier passes

    @property
    def document(self) -> Tensor | None:
        """See `LayerState.document`."""
        start, _ = self.window.bounds(self.chunk)
        if self.window.positions.layout == "plain" or start == 0:
            return None
        return without_padding(self.window.positions.document[:, :start], None)[:, -1:]

    def before(self, whole: Callable[[], Transition]) -> RecurrentState | None:
        """See `LayerState.before`."""
        own = whole()
        kept = self._wait(self._start(own.kept))
        written = self._wait(self._start(own.written))
        memory = torch.zeros_like(own.written) if self._memory is None else self._memory
        before = [memory]
        for parts in zip(kept, written, strict=True):
            before.append(Transition(*parts).apply(before[-1]))
        self._memory = before[-1]
        # Of all chunks; see `extend`.
        memory = torch.stack(before)[self.chunk % self.shard.size]
        return RecurrentState(memory, self.document)

    def keep(self, state: RecurrentState) -> None:
        """Later chunks do not use this state."""


def recurrent_outputs(
    inputs: Inputs,
    state: LayerState | GatheredState | None,
    chunk: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Outputs (B, H, T, V) of the recurrence after the tokens of earlier passes, which `state` has.

    Args:
        state: updated in place; None: there are no earlier tokens.
        chunk: tokens that are computed at once.
        dtype: of the layer's products; with bfloat16 on a GPU, fused kernels may be used.
    """
    state = state or LayerState()
    if inputs.q.shape[2] == 1 and isinstance(state, LayerState):
        out, after = step_by_step(inputs, state.last)
    elif (
        dtype == torch.bfloat16
        and inputs.q.device.type == "cuda"
        and inputs.document is None
        and isinstance(state, LayerState)
        and IS_INSTALLED
    ):
        out, after = fla_outputs(inputs, state.last)
    else:
        chunks = chunks_of(inputs, state.document, chunk)
        out, after = chunks.run(state.before(chunks.whole))
    state.keep(after)
    return out
