"""Schemes that compute the weights of query-key pairs: CoPE, Shaw, Transformer-XL, DAPE and
stick-breaking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor

from errors import ModelError
from model.attention.mask import (
    AttentionMask,
    AttentionView,
    BiasForms,
    BiasFunction,
    MaskFunction,
    QueryBlock,
    mask_dtype,
    no_autocast,
)
from model.position.interface import (
    AttentionContext,
    AttentionPlan,
    PositionalScheme,
    PositionSettings,
    SharableSettings,
    constant,
    normal,
    uniform,
)
from model.position.pairwise import (
    UNROLLED,
    over_pairs,
    pair_product,
    sum_after,
    sum_from,
)
from model.position.scaling import plain_frequencies
from model.position.schemes.biases import SMALLEST, alibi_slopes
from model.position.table import LookupTable
from settings.fields import optional, setting


def mask_per_row(
    context: AttentionContext,
    make_flex: Callable[[], BiasFunction] | None = None,
) -> AttentionMask:
    """The visible pairs, such that `QueryBlock.distance` is correct per row even if rows differ in
    positions only."""
    rows = max(context.queries.position.shape[0], context.keys.position.shape[0])
    return context.mask(forms=BiasForms(make_flex=make_flex), by_row=rows > 1)


def distances(block: QueryBlock, last: int) -> Tensor:
    """(B, H, t, s) distances as indices, at most `last`; 0 for future keys, which are masked."""
    d = block.distance.clamp(0, last)
    return d.expand(*block.q.shape[:3], block.k.shape[2])


class CopeSettings(SharableSettings):
    """Contextual positions: gates per query-key pair are summed to positions (Golovneva et al.
    2024)."""

    name: Literal["cope"] = "cope"
    positions: int = setting(64, "P: number of positions; counts are clamped to P − 1", ge=2)
    gate: Literal["scaled", "unscaled"] = setting(
        "scaled",
        "gates are σ(q·k/√D), as released, or σ(q·k), as in the paper",
    )


class Cope(PositionalScheme):
    """logit += (1 − w)·q_n·e[⌊p⌋] + w·q_n·e[⌊p⌋ + 1], p = min(Σ_{j=m..n} g_nj, P − 1), w = p − ⌊p⌋,
    with gates g_nj = σ(q_n·k_j/√D). Golovneva et al. 2024 (arXiv:2405.18719), section 4.

    As in the authors' listing, gates use the scaled logits (``gate: scaled``), q·e is added after
    the 1/√D scale, the heads share e (P, D), and e is initialized to 0, which is NoPE. A logit
    temperature scales q, and therefore the gates. Only visible keys are counted: with a window,
    sinks continue the count of the window's oldest key. P cannot be changed after training: rows
    that no count has reached are untrained.
    """

    uses_position = False
    reads_features = True
    exempt = UNROLLED
    settings: CopeSettings

    def setup(self):
        self.weight = self.learned((self.settings.positions, self.geometry.head_dim), constant(0.0))

    def plan(self, context):
        return AttentionPlan.from_mask(context.mask(), self._weights)

    def _weights(self, block: QueryBlock) -> Tensor:
        scores = block.scores + block.additive
        last = self.settings.positions - 1
        rows = block.q @ self.weight.to(scores.dtype).T  # (B, H, t, P)
        gates = (scores if self.settings.gate == "scaled" else scores / block.scale).sigmoid()
        p = sum_from(gates).clamp(max=last)  # (B, H, t, s)
        low = p.detach().long().clamp(max=last - 1)  # at p = P − 1 the weight of the upper row is 1
        here = rows.gather(-1, low)
        step = rows.diff(dim=-1).gather(-1, low)
        return block.weights_of(scores + here + (p - low) * step)


FAR_COPIES = 32  # of the entry of all far keys


class ShawSettings(SharableSettings):
    """A learned vector per clipped distance, added to keys and optionally to values (Shaw et al.
    2018)."""

    name: Literal["shaw"] = "shaw"
    clip: int = setting(16, "K: larger distances use the vector of distance K", ge=0)
    values: bool = setting(False, "also add vectors to the values")


class Shaw(PositionalScheme):
    """logit = q_n·(k_m + a_c)/√D and, with ``values``, output_n = Σ_m α_nm (v_m + b_c), c = min(n −
    m, K). Shaw, Uszkoreit, Vaswani 2018 (arXiv:1803.02155), equations 3 and 4, past side only.

    The heads share a and b (K + 1, D), initialized from N(0, 1/D). K cannot be changed after
    training. Sinks have distance K, as all distant keys.
    """

    supports_fractions = False
    reads_features = True
    exempt = UNROLLED
    settings: ShawSettings

    def setup(self):
        shape = (self.settings.clip + 1, self.geometry.head_dim)
        initial = normal(self.geometry.head_dim**-0.5)
        self.key = self.learned(shape, initial)
        self.value = self.learned(shape, initial) if self.settings.values else None

    def plan(self, context):
        if self.value is not None:
            return AttentionPlan.from_mask(
                mask_per_row(context),
                self._weights,
                self._extra_output,
            )
        if context.precompute:
            mask_per_row(context)  # the layers' own masks share its block mask
        return AttentionPlan(read=lambda q, k: [self._view(context, q, k)])

    def _view(
        self,
        context: AttentionContext,
        q: Tensor,
        k: Tensor,
    ) -> AttentionView:
        mask = mask_per_row(context, make_flex=lambda: self._bias(context, q))
        return AttentionView(q, k, mask, self._weights)

    def _bias(self, context: AttentionContext, q: Tensor) -> BiasFunction:
        """q_n·a_c/√D, looked up in the products of q with all K + 1 vectors."""
        clip = self.settings.clip
        dtype = mask_dtype(q)
        with no_autocast(q):
            rows = q.to(dtype) @ self.key.to(dtype).T * self.geometry.scale  # (B, H, Q, K + 1)
        # Far keys use copies of the last entry in turn: FlexAttention's backward pass adds to
        # entries.
        rows = torch.cat(
            [rows[..., :clip], rows[..., clip:].expand(*rows.shape[:3], FAR_COPIES)],
            dim=-1,
        )
        separation = context.separation()

        def bias(b, h, i, j):
            d = separation(b, i, j).clamp(min=0)
            return rows[b, h, i, torch.where(d < clip, d, clip + j % FAR_COPIES)]

        return bias

    def _weights(self, block: QueryBlock) -> Tensor:
        rows = block.q @ self.key.to(block.q.dtype).T  # (B, H, t, K + 1)
        return block.weights_of(
            block.scores + rows.gather(-1, distances(block, self.settings.clip)) * block.scale
        )

    def _extra_output(self, block: QueryBlock, weights: Tensor) -> Tensor:
        """Σ_m α_nm b_c. Weights are summed by clipped distance first, which avoids a (t, s, D)
        tensor."""
        assert self.value is not None
        index = distances(block, self.settings.clip)
        totals = weights.new_zeros(*weights.shape[:3], self.settings.clip + 1)
        return totals.scatter_add(-1, index, weights) @ self.value.to(weights.dtype)


THETA = 10_000.0


class TransformerXLSettings(SharableSettings):
    """Content logits plus logits of a projected sinusoid of the distance, each with a learned bias
    (Dai et al. 2019)."""

    name: Literal["transformer_xl"] = "transformer_xl"


class TransformerXL(PositionalScheme):
    """logit = (q_n·k_m + q_n·W r_d + u·k_m + v·W r_d)/√D, d = n − m, with sinusoids of width C r_d
    = [sin(dθ_i) | cos(dθ_i)], θ_i = 10000^(−2i/C). Dai et al. 2019 (arXiv:1901.02860), section 3.3.

    W (H·D, C) is initialized from N(0, 1/C), u and v (H, D) to 0. A logit temperature scales q, not
    u and v. The products with r are computed once per distance and gathered, which supports skipped
    positions and packed documents. `rel_shift` is not used; it is off by one if there are more
    cached keys than queries.
    """

    supports_fractions = False
    reads_features = True
    exempt = UNROLLED
    settings: TransformerXLSettings

    def setup(self):
        heads = self.geometry.heads
        features = self.geometry.head_dim
        dim = self.geometry.dim
        self.weight = self.learned((heads * features, dim), normal(dim**-0.5))
        self.u = self.learned((heads, features), constant(0.0))
        self.v = self.learned((heads, features), constant(0.0))
        self._table = LookupTable(self._rows)

    def _rows(self, distance: Tensor) -> tuple[Tensor, ...]:
        dim = self.geometry.dim
        angles = distance[..., None] * plain_frequencies(THETA, dim)
        return (torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :dim],)

    def tables(self, positions, dtype):
        """(1, N, C) r of the distances 0, ..., N − 1, N = `position_end`."""
        every = torch.arange(positions.position_end, device=positions.device)[None]
        return self._table.look_up(every, positions.position_end, dtype)

    def plan(self, context):
        mask = mask_per_row(context)
        keys = context.keys
        r = context.tables[0][0]  # (N, C), N distances
        if keys.layout == "plain" and keys.unit_steps:
            r = r[: keys.count]  # independent of the first position
        # Project all distances, or the queries, whichever is cheaper.
        few = context.queries.count < self.geometry.head_dim

        def read(q: Tensor, k: Tensor) -> list[AttentionView]:
            dtype = mask_dtype(q)
            rows = r.to(dtype)
            weight = self.weight.to(dtype).unflatten(0, self.u.shape)  # (H, D, C)
            with no_autocast(q):
                projected = None if few else torch.einsum("hdc,nc->hdn", weight, rows)

            def weights_fn(block: QueryBlock) -> Tensor:
                asks = block.q + self.v.to(dtype)[:, None]  # (B, H, t, D)
                by_distance = asks @ weight @ rows.T if projected is None else asks @ projected
                content = block.scores + self.u.to(dtype)[:, None] @ block.k.mT * block.scale
                positional = by_distance.gather(-1, distances(block, rows.shape[0] - 1))
                return block.weights_of(content + positional * block.scale)

            return [AttentionView(q, k, mask, weights_fn)]

        return AttentionPlan(read=read)


def kept_positive(r: Tensor) -> Tensor:
    """max(r, 0.01) with the gradient of r, so that a clamped parameter can increase again."""
    return r + (r.clamp(min=SMALLEST) - r).detach()


class DapeSettings(SharableSettings):
    """A bias of distance and a network over all heads' logits and biases (Zheng et al. 2024)."""

    name: Literal["dape"] = "dape"
    base: Literal["kerple", "alibi"] = setting("kerple", "bias B: logarithmic KERPLE, or ALiBi")
    width: int = setting(32, "hidden features of the network", ge=1)
    kernel: int = optional(
        "neighboring keys that each layer of the network reads; 1: DAPE, 3: DAPE-V2",
        1,
        ge=1,
    )

    @model_validator(mode="after")
    def _keys_have_neighbors(self):
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel {self.kernel} must be odd: as many keys before as after")
        if self.kernel > 1 and self.sinks:
            raise ValueError(
                f"kernel {self.kernel} reads neighboring keys and does not support window with "
                "sinks: set sinks to 0 or kernel to 1"
            )
        return self


class Dape(PositionalScheme):
    """logits = A + B + W2·LeakyReLU(W1·[A; B] + c), for each pair over the H heads: 2H → 32 → H, A
    = q·k/√D. Zheng et al. 2024 (arXiv:2405.14722) and their code.

    B_h(d) = −r1·ln(1 + r2·d) with r1 ~ U(0, 2), r2 ~ U(0, 1), as in KERPLE (Chi et al. 2022,
    arXiv:2205.09921), or ALiBi's −slope·d. The second layer has no bias, which the softmax would
    cancel. W1 ~ N(0, 1/2H); unlike in their code, W2 is initialized to 0, so training starts with
    the bias B alone.

    With `kernel: 3` it is DAPE-V2, Zheng et al. 2024 (arXiv:2410.04798): both layers are 1 × 3
    convolutions along the keys. A and B of masked keys are 0 before them, else a query would read
    the future. The hidden features right after a query's own key are not: in the released code they
    are those of the zeros beyond it, except for the last query, where they are 0; here all queries
    are treated as the former, so that the result does not depend on later tokens.
    """

    exempt = UNROLLED
    settings: DapeSettings

    def setup(self):
        heads = self.geometry.heads
        width = self.settings.width
        inputs = 2 * heads * self.settings.kernel
        self.weight1 = self.learned((width, inputs), normal(inputs**-0.5))
        self.bias1 = self.learned((width,), constant(0.0))
        self.weight2 = self.learned((heads, width * self.settings.kernel), constant(0.0))
        kerple = self.settings.base == "kerple"
        self.r1 = self.learned((heads,), uniform(0.0, 2.0)) if kerple else None
        self.r2 = self.learned((heads,), uniform(0.0, 1.0)) if kerple else None
        self.constant_table(alibi_slopes(heads))

    def plan(self, context):
        mask = mask_per_row(context)
        (slopes,) = context.tables

        def weights_fn(block: QueryBlock) -> Tensor:
            scores = block.scores
            b = self._bias(block.distance.clamp(min=0).to(scores.dtype), slopes)  # (R, H, t, s)
            if self.settings.kernel > 1:
                mixed = self._along_keys(scores, b.expand_as(scores), block.visible)
                return block.weights_of(scores + b + mixed)
            w1 = self.weight1.to(scores.dtype)
            w2 = self.weight2.to(scores.dtype)
            of_a, of_b = w1.tensor_split(2, dim=1)
            constant = self.bias1.to(scores.dtype)[:, None]

            def network(a: Tensor, b: Tensor) -> Tensor:
                hidden = pair_product(of_a, a, constant) + pair_product(of_b, b)
                return pair_product(w2, F.leaky_relu(hidden))

            # Matrix products over the heads, with flattened pairs.
            a_pairs = scores.transpose(0, 1).flatten(1)
            b_pairs = b.expand_as(scores).transpose(0, 1).flatten(1)
            mixed = over_pairs(network, len(w2), a_pairs, b_pairs)
            mixed = mixed.view(-1, len(scores), *scores.shape[2:]).transpose(0, 1)
            return block.weights_of(scores + b + mixed)

        return AttentionPlan.from_mask(mask, weights_fn)

    def _along_keys(self, a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
        """The network's output (B, H, t, s) for scores a and biases b (B, H, t, s), whose masked
        pairs are (R, 1, t, s) not visible."""
        kernel = self.settings.kernel
        reach = kernel // 2
        w1 = self.weight1.to(a.dtype).unflatten(1, (-1, 1, kernel))
        w2 = self.weight2.to(a.dtype).unflatten(1, (-1, 1, kernel))
        x = torch.where(visible, torch.cat([a, b], dim=1), 0.0)
        x = F.pad(x, (0, reach))
        hidden = F.leaky_relu(F.conv2d(x, w1, self.bias1.to(a.dtype), padding=(0, reach)))
        shifts = [F.pad(visible, (n, reach - n)) for n in range(reach + 1)]
        hidden = torch.where(torch.stack(shifts).any(0), hidden, 0.0)
        return F.conv2d(hidden, w2, padding=(0, reach))[..., : a.shape[-1]]

    def _bias(self, d: Tensor, slopes: Tensor) -> Tensor:
        """B (R, H, t, s) of distances (R, 1, t, s)."""
        if self.r1 is None or self.r2 is None:
            return -slopes[:, None, None] * d
        r1 = kept_positive(self.r1.to(d.dtype))[:, None, None]
        r2 = kept_positive(self.r2.to(d.dtype))[:, None, None]
        return -r1 * torch.log1p(r2 * d)


class StickBreakingSettings(PositionSettings):
    """Stick-breaking weights, from the nearest key backwards, instead of a softmax (Tan et al.
    2024)."""

    name: Literal["stick_breaking"] = "stick_breaking"
    remainder: Literal["self", "drop"] = setting(
        "self",
        "add the remaining weight to the query's own value, or drop it",
    )


class StickBreaking(PositionalScheme):
    """A_nm = σ(z_nm)·Π_{m<j<n} (1 − σ(z_nj)) for m < n, z = q·k/√D; the rest Π_{j<n} (1 − σ(z_nj))
    of the stick goes to v_n or is dropped. Tan et al. 2024 (arXiv:2410.17980).

    Only strictly earlier keys get weights: a window of w contains w − 1 of them, and the first
    token of a document has only its remainder. Computed by sums of logarithms. Without a softmax
    there is no sink; the remainder has that role.
    """

    uses_position = False
    exempt = UNROLLED
    settings: StickBreakingSettings

    def setup(self):
        s = self.settings
        if (s.sink_logit, s.weights) != ("none", "softmax"):
            raise ModelError(
                "'stick_breaking' has weights of its own: set model.position.sink_logit to none "
                "and model.position.weights to softmax; remainder = drop makes weights sum to less "
                "than 1"
            )

    def plan(self, context):
        is_own = self._is_own_key(context)
        mask = context.mask(mask_mod=lambda b, h, i, j: ~is_own(b, h, i, j))
        keep = self.settings.remainder == "self"

        def weights_fn(block: QueryBlock) -> Tensor:
            z = block.scores
            hidden = ~block.visible
            passed = F.logsigmoid(-z).masked_fill(hidden, 0.0)  # ln(1 − σ(z)), (B, H, t, s)
            weights = (F.logsigmoid(z) + sum_after(passed)).exp().masked_fill(hidden, 0.0)
            if not keep:
                return weights
            own = is_own(*mask.indices(block.start, block.stop, block.keys))
            return weights + passed.sum(-1, keepdim=True).exp() * own

        return AttentionPlan.from_mask(mask, weights_fn)

    @staticmethod
    def _is_own_key(context: AttentionContext) -> MaskFunction:
        """Whether a key is that of the query's token."""
        keys = context.keys
        queries = context.queries
        if queries.layout == "plain":
            before = keys.count - queries.count  # the queries are the last keys
            return lambda b, h, i, j: j == i + before
        q_order = queries.order.expand(context.batch, -1)
        q_document = queries.document.expand(context.batch, -1)
        k_order = keys.order.expand(context.batch, -1)
        k_document = keys.document.expand(context.batch, -1)

        def is_own(b, h, i, j):
            return (q_order[b, i] == k_order[b, j]) & (q_document[b, i] == k_document[b, j])

        return is_own
