"""Recurrent layers: linear attention with decay, the delta rule, short convolutions and gates.

One module with settings; configs/mixer/ has RetNet, GLA, Mamba-2, DeltaNet, Gated DeltaNet and KDA.
model/mixers/recurrence.py has the equation and the sources.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from model.attention.mask import by_head, mask_dtype, no_autocast
from model.mixers.mixer import AttentionPass, LayerKind, Mixer, MixerSettings
from model.mixers.recurrence import SUB_CHUNK, Inputs, LayerState, recurrent_outputs
from model.mixers.short_convolution import CausalConvolution
from model.position.content import unit
from model.position.interface import Initializer, constant
from settings.fields import setting

STEP_RANGE = (1e-3, 0.1)  # initial Δ of softplus decays, as in Mamba-2


class RecurrentMixer(MixerSettings):
    """A recurrent layer. Queries and keys have `kv_heads` heads, each shared by heads / kv_heads
    heads of values."""

    name: Literal["recurrent"] = "recurrent"
    decay: Literal["none", "constant", "head", "channel"] = setting(
        "none",
        "decay of the state per token: none (DeltaNet), 1 − 2^(−5−h) in head h "
        "(RetNet), or computed from the token for each head (Mamba-2, Gated DeltaNet) or each "
        "channel of the keys (GLA, KDA)",
    )
    decay_form: Literal["softplus", "sigmoid"] = setting(
        "softplus",
        "log of a computed decay: −exp(A)·Δ with Δ = softplus(W x + b) (Mamba-2, "
        "Gated DeltaNet, KDA), or log sigmoid(W x + b) / 16 (GLA)",
    )
    decay_rank: int | None = setting(None, "rank of W in the decay; null: full", ge=1)
    delta: bool = setting(False, "delta rule: erase β k kᵀ before writing β k vᵀ")
    beta: Literal["one", "step", "sigmoid"] = setting(
        "one",
        "factor β of what a token writes: 1, Δ of the decay (Mamba-2), or beta_max · sigmoid(W x)",
    )
    beta_max: float = setting(
        1.0,
        "largest β of beta = sigmoid; above 1, transitions have negative eigenvalues",
        gt=0,
        le=2,
    )
    unit_qk: bool = setting(False, "queries and keys of norm 1, after positions")
    scale: float | None = setting(None, "factor on queries; null: 1/√head_dim", gt=0)
    value_dim: int | None = setting(None, "dimension of each head of values; null: head_dim", ge=1)
    convolution: int = setting(
        0,
        "width of the causal convolution, with SiLU, of queries, keys and values; 0: none",
        ge=0,
    )
    convolution_bias: bool = setting(False, "bias of the convolution")
    skip: bool = setting(False, "add D·v to the output, D learned per head (Mamba-2)")
    output_norm: Literal["none", "head", "group"] = setting(
        "head",
        "RMSNorm of the output of each head, or of the heads that share a key head (Mamba-2)",
    )
    output_norm_eps: float | None = setting(
        None,
        "epsilon of this RMSNorm; null: model.norm_eps",
        gt=0,
    )
    output_gate: Literal["none", "silu", "sigmoid"] = setting(
        "none",
        "activation of the gate that multiplies the output",
    )
    gate_rank: int | None = setting(None, "rank of the gate's matrix; null: full", ge=1)
    gate_first: bool = setting(False, "true: gate, then norm (Mamba-2); false: norm, then gate")
    chunk: int = setting(32, "tokens per chunk; does not change the result", ge=1)

    @model_validator(mode="after")
    def _agree(self) -> RecurrentMixer:
        has_step = self.decay == "head" and self.decay_form == "softplus"
        if self.beta == "step" and not has_step:
            raise ValueError("beta = step requires decay = head and decay_form = softplus")
        if self.delta and self.beta == "one" and not self.unit_qk:
            raise ValueError(
                "delta with beta = one requires unit_qk = true: longer keys make the state grow "
                "without bound"
            )
        if self.gate_first and self.output_gate == "none":
            raise ValueError("gate_first requires an output_gate: silu or sigmoid")
        return self

    def describe(self):
        rule = "delta rule" if self.delta else "sums"
        return f"recurrent ({rule}, decay: {self.decay})"


class Recurrent(Mixer):
    """A recurrent layer; see `RecurrentMixer`. The state is float32, or float64 in float64 models.

    The state of a row is heads · head_dim · value_dim numbers, whatever the length.
    """

    mixer: RecurrentMixer

    def __init__(self, kind: LayerKind):
        super().__init__(kind)
        m = self.mixer
        self.value_dim = m.value_dim or kind.head_dim
        self.scale = m.scale or kind.head_dim**-0.5
        self.position = kind.modifiers()
        of_keys = self.kv_heads * self.head_dim
        of_values = self.heads * self.value_dim
        self.sizes = [of_keys, of_keys, of_values]
        self.wq = nn.Linear(kind.dim, of_keys, bias=False)
        self.wk = nn.Linear(kind.dim, of_keys, bias=False)
        self.wv = nn.Linear(kind.dim, of_values, bias=False)
        self.wo = nn.Linear(of_values, kind.dim, bias=False)
        if m.convolution:
            self.convolution = CausalConvolution(
                sum(self.sizes),
                m.convolution,
                silu=True,
                bias=m.convolution_bias,
            )
        if m.beta == "sigmoid":
            self.w_beta = nn.Linear(kind.dim, self.heads, bias=False)
        if m.decay in ("head", "channel"):
            decays = self.heads * (self.head_dim if m.decay == "channel" else 1)
            self.w_decay = _low_rank(kind.dim, decays, m.decay_rank)
            self.decay_bias = nn.Parameter(torch.empty(decays))
            if m.decay_form == "softplus":
                self.decay_rate = nn.Parameter(torch.empty(self.heads))  # A, a logarithm
        if m.skip:
            self.skip = nn.Parameter(torch.empty(self.heads))
        if m.output_norm != "none":
            features = self.value_dim if m.output_norm == "head" else of_values
            self.output_norm = nn.Parameter(torch.empty(features))
            self.norm_eps = m.output_norm_eps or kind.norm_eps
        if m.output_gate != "none":
            self.w_gate = _low_rank(kind.dim, of_values, m.gate_rank)

    @property
    def initial_values(self):
        """Decay rates exp(A), evenly spaced from 1 to 16 over the heads, and Δ, evenly spaced over
        STEP_RANGE in the logarithm, as in Mamba-2."""
        values: dict[str, Initializer] = {}
        if self.mixer.convolution_bias:
            values["convolution.bias"] = constant(0.0)
        if self.mixer.decay in ("head", "channel"):
            values["decay_bias"] = constant(0.0)
            if self.mixer.decay_form == "softplus":
                low = math.log(STEP_RANGE[0])
                high = math.log(STEP_RANGE[1])
                steps = torch.linspace(low, high, len(self.decay_bias), dtype=torch.float64).exp()
                rates = torch.linspace(1, 16, self.heads, dtype=torch.float64)
                # the inverse of softplus
                values["decay_bias"] = constant(steps + (-(-steps).expm1()).log())
                values["decay_rate"] = constant(rates.log())
        return values

    def forward(self, x, step, layer_cache):
        """x (B, T, C) → (B, K, C) for the K queries of the pass."""
        context = step.context
        state = layer_cache or LayerState()
        projected = torch.cat([self.wq(x), self.wk(x), self.wv(x)], dim=-1)
        if self.mixer.convolution:
            count = self.mixer.convolution - 1
            projected = self.convolution(state.extend(projected, count), context.document_order)
        q, k, v = projected.split(self.sizes, dim=-1)
        with no_autocast(x):
            # the residual stream and the weights may differ in dtype
            inputs = self.inputs(x.to(self.wq.weight.dtype), q, k, v, step)
            out = recurrent_outputs(inputs, state, self.mixer.chunk, v.dtype)
            if self.mixer.skip:
                out = out + self.skip[:, None, None] * inputs.v
        out = context.of_queries(out.transpose(1, 2)).to(v.dtype)
        return self.wo(self.gated(out, context.of_queries(x)))

    def inputs(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: AttentionPass,
    ) -> Inputs:
        """The inputs of the recurrence, with positions, from q, k and v (B, T, ·) of all heads.
        Tokens that are not queries of the pass have queries of zero."""
        m = self.mixer
        context = step.context
        dtype = mask_dtype(v)
        shared = self.heads // self.kv_heads
        # (B, heads, T, ·)
        q = by_head(context.of_queries(q), self.kv_heads)
        k = by_head(k, self.kv_heads)
        v = by_head(v, self.heads)
        q = q.to(dtype).repeat_interleave(shared, dim=1)
        plan = step.plan.bind(x, None)
        (view,) = plan.read(q, plan.write(k.to(dtype)))
        q = F.pad(view.q, (0, 0, x.shape[1] - view.q.shape[2], 0))
        k = view.k.repeat_interleave(shared, dim=1)
        if m.unit_qk:
            q = unit(q)
            k = unit(k)
        log_decay = delta = None
        if m.decay == "constant":
            heads = torch.arange(self.heads, device=x.device, dtype=dtype)
            log_decay = (1 - 2 ** (-5 - heads)).log()[:, None, None]
        elif m.decay != "none":
            logits = self.w_decay(x).to(dtype) + self.decay_bias.to(dtype)
            logits = by_head(logits, self.heads)  # (B, H, T, K or 1)
            if m.decay_form == "sigmoid":
                log_decay = F.logsigmoid(logits) / 16
            else:
                delta = F.softplus(logits)
                log_decay = -self.decay_rate.to(dtype).exp()[:, None, None] * delta
        if m.beta == "sigmoid":
            beta = m.beta_max * self.w_beta(x).to(dtype).sigmoid().transpose(1, 2)
        elif m.beta == "step":
            assert delta is not None
            beta = delta[..., 0]
        else:
            beta = q.new_ones(()).expand(q.shape[:3])
        return Inputs(
            q=q * self.scale,
            k=k,
            v=v.to(dtype),
            beta=beta,
            log_decay=log_decay,
            is_delta=m.delta,
            document=context.documents,
        )

    def gated(self, out: Tensor, x: Tensor) -> Tensor:
        """Outputs (B, K, H, V) of the recurrence with their norm and gate, (B, K, H·V).

        Args:
            x: layer input of the K queries, (B, K, C).
        """
        m = self.mixer
        gate = None
        if m.output_gate != "none":
            logits = self.w_gate(x).unflatten(-1, (self.heads, -1))
            gate = F.silu(logits) if m.output_gate == "silu" else logits.sigmoid()
        if gate is not None and m.gate_first:
            out = out * gate
        if m.output_norm != "none":
            groups = self.heads if m.output_norm == "head" else self.kv_heads
            grouped = out.flatten(2).unflatten(2, (groups, -1))
            normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self.norm_eps)
            out = normed.view_as(out) * self.output_norm.to(out.dtype).view(-1, self.value_dim)
        if gate is not None and not m.gate_first:
            out = out * gate
        return out.flatten(2)

    def pair_flops(self, length):
        """Training FLOPs per token without the projections: pairs within a chunk, and reads and
        updates of the state; with the delta rule about twice as many."""
        features = self.head_dim + self.value_dim
        pairs = 6 * features * (min(self.mixer.chunk, length) + 1) / 2
        state = 12 * self.head_dim * self.value_dim
        return self.heads * (pairs + state) * (2 if self.mixer.delta else 1)

    def cached_numbers(self, tokens, key_features):
        tail = max(0, self.mixer.convolution - 1) * sum(self.sizes)
        return self.heads * self.head_dim * self.value_dim + tail

    def workspace(self, batch, tokens, length, blocks):
        chunk = min(self.mixer.chunk, tokens)
        per_token = 4 * chunk + 8 * (self.head_dim + self.value_dim)
        if self.mixer.decay == "channel":
            per_token += 3 * SUB_CHUNK * self.head_dim
        state = self.head_dim * (self.head_dim + self.value_dim)
        return batch * self.heads * (tokens * per_token + 3 * (tokens // chunk + 1) * state)

    def saved_numbers(self, length):
        return self.workspace(1, length, length, 0) // length


def _low_rank(inputs: int, outputs: int, rank: int | None) -> nn.Module:
    """A matrix without bias, as a product of two if it has a rank."""
    if rank is None:
        return nn.Linear(inputs, outputs, bias=False)
    return nn.Sequential(
        nn.Linear(inputs, rank, bias=False),
        nn.Linear(rank, outputs, bias=False),
    )
