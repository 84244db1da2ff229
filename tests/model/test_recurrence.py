"""The recurrence token by token and in chunks, against each other and other implementations."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from model.mixers import recurrence
from model.mixers.recurrence import Inputs, RecurrentState, chunked, step_by_step
from tests.interop.models import double_precision

B, H, T, K, V = 2, 3, 83, 5, 7
# decay, delta rule
FORMS = {
    "linear": ("none", False),
    "retnet": ("constant", False),
    "mamba2": ("head", False),
    "gla": ("channel", False),
    "deltanet": ("none", True),
    "gated_deltanet": ("head", True),
    "kda": ("channel", True),
}
every_form = pytest.mark.parametrize("form", FORMS)


def inputs(
    form: str,
    tokens: int = T,
    decay: float = 1.0,
    document: Tensor | None = None,
) -> Inputs:
    """Random tokens with unit keys, β in (0, 1), log decays in (−`decay`, 0) and values that need
    gradients, in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(function: Callable, *shape: int) -> Tensor:
        return function(*shape, generator=generator, dtype=torch.float64)

    kind, is_delta = FORMS[form]
    shape = {
        "none": None,
        "constant": (1, H, 1, 1),
        "head": (B, H, tokens, 1),
        "channel": (B, H, tokens, K),
    }[kind]
    tensors = {
        "q": draw(torch.randn, B, H, tokens, K),
        "k": F.normalize(draw(torch.randn, B, H, tokens, K), dim=-1),
        "v": draw(torch.randn, B, H, tokens, V),
        "beta": draw(torch.rand, B, H, tokens),
        "log_decay": None if shape is None else -decay * draw(torch.rand, *shape),
    }
    for x in tensors.values():
        if x is not None:
            x.requires_grad_()
    return Inputs(**tensors, is_delta=is_delta, document=document)


TENSORS = ("q", "k", "v", "beta", "log_decay")


def replaced(x: Inputs, function: Callable[[Tensor], Tensor], names=TENSORS) -> Inputs:
    """The inputs with a function of some of their tensors."""
    tensors = {name: getattr(x, name) for name in names}
    return dataclasses.replace(
        x, **{name: None if each is None else function(each) for name, each in tensors.items()}
    )


def difference(x: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected number."""
    largest = expected.abs().max().clamp(min=1e-300)
    return ((x - expected).abs().max() / largest).item()


CLOSE = 1e-10
# Row 0 ends in padding inside a document; row 1 begins with padding.
DOCUMENT = torch.tensor(
    [
        [4] * 20 + [5] * 50 + [-1] * 3 + [5] * 10,
        [-1] * 9 + [4] * 60 + [7] * 14,
    ]
)


@every_form
@pytest.mark.parametrize("size", [1, 7, 16, 24, 64, 128])
@pytest.mark.parametrize("document", [None, DOCUMENT], ids=["plain", "packed"])
def test_chunks_equal_single_steps(form, size, document):
    """Outputs, the last state, and gradients of both."""
    x = inputs(form, document=document)
    weights = torch.randn(B, H, T, V, dtype=torch.float64)
    of_state = torch.randn(B, H, K, V, dtype=torch.float64)
    leaves = [each for name in TENSORS if (each := getattr(x, name)) is not None]
    results = []
    for out, state in (step_by_step(x), chunked(x, chunk=size)):
        loss = (out * weights).sum() + (state.memory * of_state).sum()
        results.append([out, state.memory, *torch.autograd.grad(loss, leaves)])
    for expected, found in zip(*results, strict=True):
        assert difference(found, expected) < CLOSE


@every_form
@torch.no_grad()
def test_padding_and_other_documents_have_no_effect(form):
    """Each document of `DOCUMENT` by itself, without the padding inside it."""
    x = inputs(form, document=DOCUMENT)
    out, _ = step_by_step(x)
    for row, document in (
        (0, 4),
        (0, 5),
        (1, 4),
        (1, 7),
    ):
        own = DOCUMENT[row] == document

        def of(each: Tensor, row=row, own=own) -> Tensor:
            return each if each.shape[2] == 1 else each[row : row + 1, :, own]

        alone = replaced(dataclasses.replace(x, document=None), of)
        assert difference(of(out), step_by_step(alone)[0]) < CLOSE


DECAYS = [1e-12, 5.0, 300.0, 1e5, torch.inf]


@pytest.mark.parametrize("form", [form for form, (decay, _) in FORMS.items() if decay != "none"])
def test_vanishing_and_strong_decay(form):
    for decay in DECAYS:
        x = replaced(inputs(form), lambda each, decay=decay: each.detach() * decay, ["log_decay"])
        assert difference(chunked(x)[0], step_by_step(x)[0]) < CLOSE


@pytest.mark.parametrize("form", ["deltanet", "gated_deltanet", "kda"])
def test_extreme_beta_and_repeated_keys(form):
    x = inputs(form, tokens=1000, decay=1e-3)
    repeated = replaced(x, lambda k: k[:, :, :1].expand_as(k), ["k"])
    for beta in (0.0, 1.0, 2.0):
        for keys in (x, repeated):
            own = replaced(keys, lambda each, beta=beta: torch.full_like(each, beta), ["beta"])
            assert difference(chunked(own)[0], step_by_step(own)[0]) < CLOSE


@pytest.mark.parametrize("form", ["gla", "kda"])
def test_float32_does_not_overflow(form):
    """exp(−Σ log decay) over a chunk is infinite in float32 from a decay of 1.4 per token."""
    x = inputs(form, decay=10.0)
    expected, _ = step_by_step(x)
    single = replaced(x, lambda each: each.detach().float())
    single.log_decay.requires_grad_()
    out, _ = chunked(single)
    (gradient,) = torch.autograd.grad(out.sum(), single.log_decay)
    (in_double,) = torch.autograd.grad(expected.sum(), x.log_decay)
    assert difference(out, expected) < 1e-5
    assert difference(gradient, in_double) < 1e-4


@pytest.mark.parametrize("tokens", [4096, pytest.param(65_536, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["kda", "mamba2"])
@torch.no_grad()
def test_long_sequences(form, tokens):
    """Also in float32, whose errors do not grow with the length."""
    x = inputs(form, tokens=tokens, decay=1e-3)
    expected, end = step_by_step(x)
    out, state = chunked(x)
    assert difference(out, expected) < CLOSE
    assert difference(state.memory, end.memory) < CLOSE
    out, _ = chunked(replaced(x, Tensor.float))
    assert difference(out, expected) < 1e-4


def by_token(x: Tensor) -> Tensor:
    """(B, H, T, ·) ↔ (B, T, H, ·)."""
    return x.transpose(1, 2)


@pytest.mark.parametrize(
    ("form", "reference"),
    [
        ("deltanet", qwen.torch_recurrent_gated_delta_rule),
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
    decay = torch.zeros(B, H, T, 1) if x.log_decay is None else x.log_decay
    decay = decay if form == "kda" else decay[..., 0]
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
        assert scale == 1
        assert output_final_state
        assert q.shape == (B, T, H, K)
        assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
        assert g is None or g.ndim in (3, 4)
        is_delta = beta is not None
        beta = torch.ones(B, T, H) if beta is None else beta
        tokens = (each.transpose(1, 2).double() for each in (q, k, v, beta))
        decay = None if g is None else g.transpose(1, 2).reshape(B, H, T, -1)
        out, end = step_by_step(
            Inputs(*tokens, decay, is_delta), RecurrentState(initial_state, None)
        )
        return out.transpose(1, 2), end.memory

    name = recurrence.FLA_KERNELS[
        x.is_delta, None if x.log_decay is None else x.log_decay.shape[-1] > 1
    ]
    package = SimpleNamespace(**{f"chunk_{name}": kernel})
    monkeypatch.setattr(recurrence, "import_module", {f"fla.ops.{name}": package}.__getitem__)
    counter = CompileCounter()
    with torch.no_grad():
        expected, end = chunked(x, before)
        # Dynamo cannot trace the import of fla.
        compiled = torch.compile(lambda: recurrence.fla_outputs(x, before), backend=counter)
        out, state = compiled()
    assert counter.frame_count == 0
    assert difference(out, expected) < 0.02
    assert difference(state.memory, end.memory) < 0.02


@pytest.mark.parametrize("form", [form for form, (_, is_delta) in FORMS.items() if not is_delta])
@torch.no_grad()
def test_forms_without_the_delta_rule_are_sums_over_pairs(form):
    x = inputs(form)
    decay = torch.zeros(1, dtype=torch.float64) if x.log_decay is None else x.log_decay
    total = decay.expand(B, H, T, K).cumsum(2)
    between = (total[:, :, :, None] - total[:, :, None]).exp()  # (B, H, T, S, K)
    weights = torch.einsum("bhtk,bhtsk,bhsk,bhs->bhts", x.q, between, x.k, x.beta).tril()
    assert difference(chunked(x)[0], weights @ x.v) < CLOSE
