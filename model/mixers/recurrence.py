"""The recurrence of linear attention with decay and the delta rule, in two forms, and its cache.

With the delta rule, S_t = (I − β_t k_t k_tᵀ) D_t S_{t−1} + β_t k_t v_tᵀ; without it,
S_t = D_t S_{t−1} + β_t k_t v_tᵀ. The output is y_t = S_tᵀ q_t. The state S is a (K, V) matrix per
head; D_t is diagonal over the K channels of the key and given by its logarithm. The size of the
state does not depend on the number of tokens.

`recurrent_outputs` chooses a form or, on GPUs, kernels of flash-linear-attention (0.6) if it is
installed. These kernels compute in bfloat16 with a state in float32. The kernel without decay has
run on a GPU (docs/benchmarks/gpu); tests replace the kernels.

Shapes: B rows, H heads, T tokens, K channels of keys and queries, V channels of values, N chunks of
C tokens.

Sources: RetNet (arXiv:2307.08621), GLA (arXiv:2312.06635), Mamba-2 (arXiv:2405.21060), DeltaNet
(arXiv:2406.06484), Gated DeltaNet (arXiv:2412.06464), KDA (arXiv:2510.26692).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import CachedTail
from model.sharding import GatheredLayer, ShardedWindow

SUB_CHUNK = 16  # tokens of a chunk that are compared pair by pair if decay is per channel


@dataclass(frozen=True)
class RecurrentState:
    """The state after some token.

    Attributes:
        memory: S, (B, H, K, V).
        document: (B or 1, 1) document of the token; None if there is only one in all passes.
    """

    memory: Tensor
    document: Tensor | None


@dataclass(frozen=True)
class Inputs:
    """The tokens of one pass.

    Attributes:
        q, k: (B, H, T, K).
        v: (B, H, T, V).
        beta: (B, H, T) factor β of what a token writes.
        log_decay: logarithm of the diagonal of D, at most 0, broadcastable to (B, H, T, K); its
            last dimension is 1 if all channels decay alike. None: no decay.
        is_delta: whether the delta rule is used.
        document: (B or 1, T) documents, each contiguous; the state is reset where a document
            begins. −1 is padding, which neither writes nor decays. None: one document.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    is_delta: bool
    document: Tensor | None = None

    def without_padding(self, before: Tensor | None) -> Inputs:
        """These tokens, with padding moved to the document before it and without effect.

        Args:
            before: (B or 1, 1) document of the token before this pass; None: there is none.
        """
        log_decay = self.log_decay
        if log_decay is not None:
            log_decay = log_decay.expand(*self.beta.shape, log_decay.shape[-1])
            # Its exp is 0, and differences of sums of finite numbers are not NaN.
            log_decay = log_decay.clamp(min=math.log(torch.finfo(log_decay.dtype).tiny))
        if self.document is None:
            return replace(self, log_decay=log_decay)
        is_token = self.document[:, None] >= 0
        return replace(
            self,
            beta=self.beta * is_token,
            log_decay=None if log_decay is None else log_decay * is_token[..., None],
            document=without_padding(self.document, before),
        )


def without_padding(document: Tensor, before: Tensor | None) -> Tensor:
    """Documents (B or 1, T) in which padding has the document of the last token before it."""
    first = torch.full_like(document[:, :1], -1) if before is None else before
    rows = max(len(first), len(document))
    first = first.expand(rows, 1)
    document = document.expand(rows, -1)
    whole = torch.cat([first, document], dim=1)  # (B or 1, 1 + T)
    index = torch.arange(whole.shape[1], device=whole.device).expand_as(whole)
    last_token = index.masked_fill(whole < 0, 0).cummax(dim=1).values
    return whole.gather(1, last_token)[:, 1:]


def step_by_step(
    inputs: Inputs,
    before: RecurrentState | None = None,
) -> tuple[Tensor, RecurrentState]:
    """Outputs (B, H, T, V) and the last state, computed one token after the other, by the
    equation."""
    last_document = None if before is None else before.document
    inputs = inputs.without_padding(last_document)
    q = inputs.q
    k = inputs.k
    v = inputs.v
    document = inputs.document
    memory = q.new_zeros(*q.shape[:2], k.shape[3], v.shape[3])
    if before is not None:
        memory = before.memory
    outputs = []
    for t in range(q.shape[2]):
        if document is not None:
            own = document[:, t : t + 1]
            if last_document is not None:
                memory = memory * (own == last_document)[..., None, None]
            last_document = own
        if inputs.log_decay is not None:
            memory = memory * inputs.log_decay[:, :, t, :, None].exp()
        query = q[:, :, t, None]
        key = k[:, :, t, :, None]
        value = v[:, :, t, None]
        beta = inputs.beta[:, :, t, None, None]
        if inputs.is_delta:
            value = value - key.mT @ memory
        memory = memory + beta * key * value
        outputs.append(query @ memory)
    out = torch.cat(outputs, dim=2) if outputs else v
    return out, RecurrentState(memory, last_document)


@dataclass(frozen=True)
class Transition:
    """The effect of segments of tokens on a state: S ← kept S + written.

    Attributes:
        kept: (…, K, K) with the delta rule; otherwise (…, K or 1, 1), a factor per channel.
        written: (…, K, V).
    """

    kept: Tensor
    written: Tensor

    def apply(self, memory: Tensor) -> Tensor:
        """The state after the segment, from the state (…, K, V) before it."""
        return self._keep(memory) + self.written

    def after(self, first: Transition) -> Transition:
        """The transition of the segment `first` and this one together."""
        return Transition(self._keep(first.kept), self.apply(first.written))

    def _keep(self, memory: Tensor) -> Tensor:
        is_matrix = self.kept.shape[-1] == self.written.shape[-2]
        return self.kept @ memory if is_matrix else self.kept * memory


@dataclass(frozen=True)
class Chunks:
    """The tokens of a pass in N chunks, as functions of the state S before each chunk.

    Attributes:
        local: (B, H, N, C, V) outputs for an empty state.
        reader: (B, H, N, C, K); outputs are local + reader S.
        transition: transition of each chunk, (B, H, N, ·, ·).
        tokens: T; the last chunk is padded.
        document: document of the last token; see `RecurrentState`.
    """

    local: Tensor
    reader: Tensor
    transition: Transition
    tokens: int
    document: Tensor | None

    def _transitions(self) -> list[Transition]:
        kept = self.transition.kept.unbind(2)
        written = self.transition.written.unbind(2)
        return [Transition(*pair) for pair in zip(kept, written, strict=True)]

    def whole(self) -> Transition:
        """The transition of all tokens, (B, H, ·, ·)."""
        whole, *later = self._transitions()
        for chunk in later:
            whole = chunk.after(whole)
        return whole

    def run(self, before: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Outputs (B, H, T, V) and the last state."""
        written = self.transition.written
        memory = torch.zeros_like(written[:, :, 0]) if before is None else before.memory
        states = []
        for chunk in self._transitions():
            states.append(memory)
            memory = chunk.apply(memory)
        out = self.local + self.reader @ torch.stack(states, dim=2)
        out = out.flatten(2, 3)[:, :, : self.tokens]
        return out, RecurrentState(memory, self.document)


def chunked(
    inputs: Inputs,
    before: RecurrentState | None = None,
    chunk: int = 64,
) -> tuple[Tensor, RecurrentState]:
    """Outputs (B, H, T, V) and the last state, equal to `step_by_step`; T ≥ 1."""
    document = None if before is None else before.document
    return chunks_of(inputs, document, chunk).run(before)


def chunks_of(inputs: Inputs, before: Tensor | None, chunk: int = 64) -> Chunks:
    """The tokens of a pass in chunks of `chunk` tokens.

    Within a chunk, with G_t the sum of log decays up to token t, the delta rule writes k_t u_tᵀ
    where (I + L) u = β (v − (k ⊙ exp G) S) and L_ij = β_i Σ_c k_ic k_jc exp(G_ic − G_jc) for j < i.
    The system is solved by substitution: a power series of L overflows if keys repeat.

    Args:
        before: (B or 1, 1) document of the token before this pass; None: there is none, or only one
            document in all passes.
    """
    inputs = inputs.without_padding(before)
    tokens = inputs.q.shape[2]
    size = min(chunk, tokens)
    count = -(-tokens // size)
    padding = count * size - tokens

    def split(x: Tensor) -> Tensor:  # (B, H, T, ·) → (B, H, N, C, ·), zero-padded
        return F.pad(x, (0, 0, 0, padding)).unflatten(2, (count, size))

    q = split(inputs.q)
    k = split(inputs.k)
    v = split(inputs.v)
    beta = split(inputs.beta[..., None])
    visible = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    document = chunks = None
    if inputs.document is not None:
        document = inputs.document[:, -1:]
        padded = torch.cat([inputs.document, document.expand(-1, padding)], dim=1)
        chunks = padded.unflatten(1, (count, size))  # (B or 1, N, C)
        is_same = chunks[..., None] == chunks[..., None, :]
        visible = visible & is_same[:, None]
    sums = k.new_zeros(1, 1, 1, size, 1)
    if inputs.log_decay is not None:
        sums = _sums(split(inputs.log_decay), chunks)
    from_start = sums.exp()  # decay of the state before the chunk, up to each token
    to_end = _decay(sums[..., -1:, :] - sums)  # decay of each token, up to the chunk's end
    if chunks is not None:
        ends = chunks[:, :, -1:]
        first = chunks[:, :1, :1]
        if before is not None:
            first = before[:, None].expand_as(first)
        of_state = torch.cat([first, ends[:, :-1]], dim=1)
        has_state = chunks == of_state
        reaches_end = chunks == ends
        from_start = from_start * has_state[:, None, :, :, None]
        to_end = to_end * reaches_end[:, None, :, :, None]

    reader = q * from_start
    writer = (k * to_end).mT
    kept = from_start[..., -1, :, None].expand(*k.shape[:3], -1, 1)
    written_k = beta * k
    rows = [q, written_k] if inputs.is_delta else [q]
    pairs = _pair_products(torch.stack(rows, dim=3), k, sums, visible)
    of_queries = pairs[:, :, :, 0]
    if not inputs.is_delta:
        v = beta * v
        transition = Transition(kept, writer @ v)
        return Chunks(of_queries @ v, reader, transition, tokens, document)
    # u = values − erased S
    solved = torch.linalg.solve_triangular(
        pairs[:, :, :, 1],
        torch.cat([beta * v, written_k * from_start], dim=-1),
        upper=False,
        unitriangular=True,
    )
    values = solved[..., : v.shape[-1]]
    erased = solved[..., v.shape[-1] :]
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    return Chunks(
        local=of_queries @ values,
        reader=reader - of_queries @ erased,
        transition=Transition(
            kept=identity * kept - writer @ erased,
            written=writer @ values,
        ),
        tokens=tokens,
        document=document,
    )


def _sums(log_decay: Tensor, document: Tensor | None) -> Tensor:
    """Cumulative sums (B, H, N, C, ·) over the tokens of a chunk, restarted in each document
    (B or 1, N, C), without rounding errors of other documents."""
    sums = log_decay
    shift = 1
    while shift < sums.shape[3]:
        earlier = F.pad(sums[..., :-shift, :], (0, 0, shift, 0))
        if document is not None:
            earlier_document = F.pad(document[..., :-shift], (shift, 0), value=-2)
            continues = document == earlier_document
            earlier = earlier * continues[:, None, :, :, None]
        sums = sums + earlier
        shift *= 2
    return sums


def _decay(exponent: Tensor) -> Tensor:
    """exp of exponents, at most 1: those of pairs that are masked later may be above 0."""
    return exponent.clamp(max=0).exp()


def _pair_products(rows: Tensor, k: Tensor, sums: Tensor, visible: Tensor) -> Tensor:
    """Σ_c x_ic k_jc exp(G_ic − G_jc) for each visible token j of i, without exponents above 0.

    Args:
        rows: x, (B, H, N, R, C, K).
        k: (B, H, N, C, K).
        sums: G, sums of log decays in the chunk, restarted in each document,
            (B, H, N, C, K or 1).
        visible: (…, C, C) j ≤ i of the same document.

    Returns:
        (B, H, N, R, C, C); 0 for other pairs.
    """
    if sums.shape[-1] == 1:
        decay = _decay(sums - sums.mT) * visible
        products = rows @ k.mT[:, :, :, None]
        return products * decay[:, :, :, None]
    # exp(G_i) exp(−G_j) would overflow. A block of queries is anchored at its first token, a: for
    # earlier blocks exp(G_i − G_a) exp(G_a − G_j), within the block the differences themselves.
    size = k.shape[3]
    width = size if size <= SUB_CHUNK else math.gcd(size, SUB_CHUNK)
    count = size // width

    def blocks(x: Tensor) -> Tensor:  # (…, C, K) → (…, M, c, K)
        return x.unflatten(-2, (count, width))

    rows = blocks(rows)
    block_sums = blocks(sums)
    anchors = block_sums[..., :1, :]
    anchored_rows = rows * _decay(block_sums - anchors)[:, :, :, None]
    anchored_keys = k[:, :, :, None] * _decay(anchors - sums[:, :, :, None])
    far = anchored_rows @ anchored_keys.mT[:, :, :, None]  # (…, R, M, c, C)
    differences = block_sums[..., :, None, :] - block_sums[..., None, :, :]
    decayed = blocks(k)[..., None, :, :] * _decay(differences)  # (…, M, c, c, K)
    near = decayed @ rows.movedim(3, -1)  # (…, M, c, c, R)
    near = near.movedim(-1, 3)[..., None, :]  # (…, R, M, c, 1, c)
    far = far.unflatten(-1, (count, width))  # (…, R, M, c, M, c)
    own_block = torch.eye(count, dtype=torch.bool, device=k.device)
    pairs = torch.where(own_block[:, None, :, None], near, far)
    return pairs.flatten(-2).flatten(-3, -2) * visible[..., None, :, :]


# by (whether the delta rule is used, whether decay differs between channels; None: no decay)
FLA_KERNELS = {
    (True, None): "delta_rule",
    (True, False): "gated_delta_rule",
    (True, True): "kda",
    (False, None): "simple_gla",
    (False, False): "simple_gla",
    (False, True): "gla",
}


IS_INSTALLED = find_spec("fla") is not None


# Dynamo cannot trace the import of fla, and fla's kernels are not traced either.
# torch.compiler.disable would import Dynamo here, which takes half as long as importing torch.
@torch._disable_dynamo
def fla_outputs(inputs: Inputs, before: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
    """See `chunked`; for a single document."""
    decay = inputs.without_padding(None).log_decay

    def by_token(x: Tensor) -> Tensor:  # (B, H, T, ·) → (B, T, H, ·)
        return x.transpose(1, 2).bfloat16()

    name = FLA_KERNELS[inputs.is_delta, None if decay is None else decay.shape[-1] > 1]
    tensors = {"v": by_token(inputs.v)}
    if inputs.is_delta:
        tensors["beta"] = by_token(inputs.beta)
    else:
        tensors["v"] = by_token(inputs.v * inputs.beta[..., None])
    if decay is not None:
        by_channel = decay.shape[-1] > 1
        tensors["g"] = (decay if by_channel else decay[..., 0]).transpose(1, 2)
    kernel = getattr(import_module(f"fla.ops.{name}"), f"chunk_{name}")
    out, memory = kernel(
        q=by_token(inputs.q),
        k=by_token(inputs.k),
        **tensors,
        scale=1.0,
        initial_state=None if before is None else before.memory,
        output_final_state=True,
    )
    return out.transpose(1, 2).to(inputs.v.dtype), RecurrentState(memory, None)


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
        """An empty cache for passes of one token, which compare documents; see `fill`."""
        made = LayerState()
        made._stored = {name: torch.zeros_like(x) for name, x in self._stored.items()}
        memory = made._stored.get("memory")
        if memory is not None and "document" not in made._stored:
            made._stored["document"] = memory.new_zeros(1, 1, dtype=torch.int64)
        return made


class GatheredState(GatheredLayer):
    """State of one layer over a window that is sharded over processes; see `LayerState`.

    All ranks gather the transitions of all chunks of a pass and apply them in order. With the delta
    rule that is K·K + K·V numbers per head and chunk, otherwise K + K·V.
    """

    def __init__(self, window: ShardedWindow):
        super().__init__(window)
        self._memory: Tensor | None = None  # state after the chunks of earlier passes

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
        # Stack the states of all chunks; see `extend`.
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
    """Outputs (B, H, T, V) of the recurrence, which continues from the tokens of earlier passes.

    Args:
        state: the state after earlier tokens, updated in place; None: there are no earlier tokens.
        chunk: tokens that are computed at once.
        dtype: dtype of the layer's products; with bfloat16 on a GPU, fused kernels may be used.
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
