"""The recurrence token by token and in chunks, against each other and other implementations."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from model.fast import fla as fla_kernels
from model.mixers.recurrence import Inputs, RecurrentState, chunked, step_by_step
from tests.interop.models import double_precision
from tests.model.recurrences import (
    FORMS,
    B,
    H,
    K,
    T,
    V,
    difference,
    every_form,
    fla,
    inputs,
    tensors_of,
)

CLOSE = 1e-10
# Row 0 ends in padding inside a document; row 1 begins with padding.
DOCUMENT = torch.tensor([[4] * 20 + [5] * 50 + [-1] * 3 + [5] * 10, [-1] * 9 + [4] * 60 + [7] * 14])


@every_form
@pytest.mark.parametrize("size", [1, 7, 16, 24, 64, 128])
@pytest.mark.parametrize("document", [None, DOCUMENT], ids=["plain", "packed"])
def test_chunks_equal_single_steps(form, size, document):
    x = inputs(form, document=document)
    expected, end = step_by_step(x)
    out, state = chunked(x, chunk=size)
    assert difference(out, expected) < CLOSE
    assert difference(state.memory, end.memory) < CLOSE


@every_form
@torch.no_grad()
def test_padding_and_other_documents_have_no_effect(form):
    """Each document of `DOCUMENT` by itself, without the padding inside it."""
    x = inputs(form, document=DOCUMENT)
    for out, _ in (chunked(x, chunk=16), step_by_step(x)):
        for row, document in ((0, 4), (0, 5), (1, 4), (1, 7)):
            own = DOCUMENT[row] == document

            def of(each: torch.Tensor | None, row=row, own=own) -> torch.Tensor | None:
                if each is None or each.shape[2] == 1:
                    return each
                return each[row : row + 1, :, own]

            names = ("q", "k", "v", "beta", "log_decay")
            alone = dataclasses.replace(
                x, **{name: of(getattr(x, name)) for name in names}, document=None
            )
            assert difference(of(out), step_by_step(alone)[0]) < CLOSE


@every_form
@pytest.mark.parametrize("size", [1, 16, 64])
def test_gradients_of_chunks_equal_those_of_single_steps(form, size):
    x = inputs(form, document=DOCUMENT)
    weights = torch.randn(B, H, T, V, dtype=torch.float64)
    of_state = torch.randn(B, H, K, V, dtype=torch.float64)

    def gradients(out: torch.Tensor, state: RecurrentState) -> tuple[torch.Tensor, ...]:
        loss = (out * weights).sum() + (state.memory * of_state).sum()
        return torch.autograd.grad(loss, tensors_of(x))

    expected = gradients(*step_by_step(x))
    for gradient, one_by_one in zip(gradients(*chunked(x, chunk=size)), expected, strict=True):
        assert difference(gradient, one_by_one) < CLOSE


@pytest.mark.parametrize("form", [form for form, (decay, _) in FORMS.items() if decay != "none"])
@pytest.mark.parametrize("decay", [1e-12, 5.0, 300.0, 1e5, torch.inf])
def test_vanishing_and_strong_decay(form, decay):
    x = inputs(form)
    x = dataclasses.replace(x, log_decay=x.log_decay.detach() * decay)
    expected, _ = step_by_step(x)
    out, _ = chunked(x)
    assert difference(out, expected) < CLOSE


@pytest.mark.parametrize("form", ["gla", "kda"])
def test_float32_does_not_overflow(form):
    """exp(−Σ log decay) over a chunk is infinite in float32 from a decay of 1.4 per token."""
    x = inputs(form, decay=10.0)
    expected, _ = step_by_step(x)
    single = dataclasses.replace(
        x,
        **{f: getattr(x, f).detach().float() for f in ("q", "k", "v", "beta", "log_decay")},
    )
    single.log_decay.requires_grad_()
    out, _ = chunked(single)
    (gradient,) = torch.autograd.grad(out.sum(), single.log_decay)
    (in_double,) = torch.autograd.grad(expected.sum(), x.log_decay)
    assert difference(out, expected) < 1e-5
    assert difference(gradient, in_double) < 1e-4


@pytest.mark.parametrize("form", ["deltanet", "gated_deltanet", "kda"])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("keys", ["random", "repeated"])
def test_extreme_beta_and_repeated_keys(form, beta, keys):
    x = inputs(form, tokens=1000, decay=1e-3)
    k = x.k if keys == "random" else x.k[:, :, :1].expand_as(x.k)
    x = dataclasses.replace(x, k=k, beta=torch.full_like(x.beta, beta))
    expected, _ = step_by_step(x)
    out, _ = chunked(x)
    assert difference(out, expected) < CLOSE


@pytest.mark.parametrize(
    "form", ["kda", *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS if f != "kda")]
)
@torch.no_grad()
def test_65536_tokens(form):
    """Also in float32, whose errors do not grow with the length."""
    x = inputs(form, tokens=65_536, decay=1e-3)
    expected, end = step_by_step(x)
    out, state = chunked(x)
    assert difference(out, expected) < CLOSE and difference(state.memory, end.memory) < CLOSE
    tensors = {f: getattr(x, f) for f in ("q", "k", "v", "beta", "log_decay")}
    single = {name: None if each is None else each.float() for name, each in tensors.items()}
    out, _ = chunked(dataclasses.replace(x, **single))
    assert difference(out, expected) < 1e-4


def by_token(x: torch.Tensor) -> torch.Tensor:
    """(B, H, T, ·) ↔ (B, T, H, ·)."""
    return x.transpose(1, 2)


@pytest.mark.parametrize(
    ("form", "reference"),
    [
        ("gated_deltanet", qwen.torch_recurrent_gated_delta_rule),
        ("gated_deltanet", qwen.torch_chunk_gated_delta_rule),
        ("gated_deltanet", olmo.torch_recurrent_gated_delta_rule),
        ("kda", kimi.chunk_kimi_delta_attention),
        ("kda", kimi.recurrent_kimi_delta_attention),
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x.__module__.split('.')[-2]}-{x.__name__}",
)
@torch.no_grad()
def test_the_delta_rule_equals_transformers(form, reference):
    x = inputs(form)
    decay = x.log_decay[..., 0] if form == "gated_deltanet" else x.log_decay
    before = torch.randn(B, H, K, V, dtype=torch.float64)
    tensors = {"g": by_token(decay), "beta": by_token(x.beta)}
    with double_precision():
        expected, end = reference(
            by_token(x.q),
            by_token(x.k),
            by_token(x.v),
            **tensors,
            initial_state=before,
            output_final_state=True,
        )
    x = dataclasses.replace(x, q=x.q * K**-0.5)
    out, state = chunked(x, RecurrentState(before, None))
    assert difference(out, by_token(expected)) < CLOSE
    assert difference(state.memory, end) < CLOSE


@pytest.mark.parametrize("form", FORMS)
def test_arguments_of_kernels(form, monkeypatch):
    """Kernels of flash-linear-attention get tokens before heads, decays as logarithms in float32
    and products in bfloat16. The replacement computes them in float64."""
    x = inputs(form)
    before = RecurrentState(torch.randn(B, H, K, V, dtype=torch.float64), None)

    def kernel(*, q, k, v, g=None, beta=None, scale, initial_state, output_final_state):
        assert scale == 1 and output_final_state and q.shape == (B, T, H, K)
        assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16} and (g is None or g.ndim in (3, 4))
        is_delta = beta is not None
        beta = torch.ones(B, T, H) if beta is None else beta
        tokens = (each.transpose(1, 2).double() for each in (q, k, v, beta))
        decay = None if g is None else g.transpose(1, 2).reshape(B, H, T, -1)
        out, end = step_by_step(
            Inputs(*tokens, decay, is_delta), RecurrentState(initial_state, None)
        )
        return out.transpose(1, 2), end.memory

    name = fla_kernels.KERNELS[
        x.is_delta, None if x.log_decay is None else x.log_decay.shape[-1] > 1
    ]
    package = SimpleNamespace(**{f"chunk_{name}": kernel})
    monkeypatch.setattr(fla_kernels, "import_module", {f"fla.ops.{name}": package}.__getitem__)
    with torch.no_grad():
        expected, end = chunked(x, before)
        out, state = fla_kernels.fla_outputs(x, before)
    assert difference(out, expected) < 0.02
    assert difference(state.memory, end.memory) < 0.02


@torch.no_grad()
def test_mamba2_equals_transformers():
    """Decay −exp(A_log) Δ and writing strength Δ, with keys and queries in one group."""
    x = inputs("mamba2")
    step = F.softplus(torch.randn(B, T, H, dtype=torch.float64))
    rate = -torch.rand(H, dtype=torch.float64) * 16
    with double_precision():
        expected, end = mamba2.mamba2_chunk_scan(
            by_token(x.v),
            step,
            rate,
            by_token(x.k[:, :1]),
            by_token(x.q[:, :1]),
            chunk_size=16,
            return_final_states=True,
        )
    step = by_token(step)
    x = dataclasses.replace(
        x,
        q=x.q[:, :1].expand_as(x.q),
        k=x.k[:, :1].expand_as(x.k),
        beta=step,
        log_decay=(step * rate[:, None])[..., None],
    )
    out, state = chunked(x)
    assert difference(out, by_token(expected)) < CLOSE
    assert difference(state.memory, end.mT) < CLOSE


@pytest.mark.parametrize(
    ("form", "operation", "function"),
    [
        ("retnet", "retention", "naive_retention"),
        ("mamba2", "simple_gla", "naive_recurrent_simple_gla"),
        ("gla", "gla", "naive_recurrent_gla"),
        ("deltanet", "delta_rule", "delta_rule_recurrence"),
        ("gated_deltanet", "gated_delta_rule", "naive_recurrent_gated_delta_rule"),
        ("kda", "kda", "naive_recurrent_kda"),
    ],
)
@torch.no_grad()
def test_forms_equal_flash_linear_attention(form, operation, function):
    x = inputs(form)
    with double_precision():
        reference = getattr(fla(operation), function)
        if form == "retnet":
            expected = by_token(reference(x.q, x.k, x.v))
        elif form == "deltanet":
            expected = by_token(reference(x.q, x.k, x.v, x.beta)[0])
        else:
            decay = x.log_decay if form in ("gla", "kda") else x.log_decay[..., 0]
            name = "gk" if form == "gla" else "g"
            tensors = {name: by_token(decay)}
            if x.is_delta:
                tensors["beta"] = by_token(x.beta)
            expected, _ = reference(by_token(x.q), by_token(x.k), by_token(x.v), **tensors)
    constant = (1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))).log()
    x = dataclasses.replace(
        x,
        q=x.q * K**-0.5,
        beta=x.beta if x.is_delta else torch.ones_like(x.beta),
        log_decay=constant[:, None, None] if form == "retnet" else x.log_decay,
    )
    out, _ = chunked(x)
    assert difference(by_token(out), expected) < CLOSE
