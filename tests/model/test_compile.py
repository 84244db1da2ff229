"""The forward pass is one graph per input layout; the `eager` backend reports breaks and
recompiles."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import model.attention.kernels
import model.loss
from model import SCHEMES, TokenPositions
from tests.model.zoo import (
    build,
    close,
    each_mechanism,
    ids,
    packed,
    reach_of,
    schemes_of,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

B = 2
# One of each kind: every default, a window, a rule that follows the length, a pattern.
KINDS = [
    *SCHEMES,
    "rope-self-extend",
    "rope-streaming",
    "rope-window",
    "rope-yarn-auto",
    "pattern-none",
]


def step(net, positions: TokenPositions, tokens: torch.Tensor) -> float:
    net.zero_grad()
    loss = net(tokens, positions, targets=tokens.roll(1, 1)).mean()
    loss.backward()
    return float(loss.detach())


def graphs_of(case: str, steps: list[TokenPositions]) -> int:
    """The number of graphs of training steps, whose losses and gradients are those without
    compilation."""
    layers = 2 if case.startswith("pattern") else 1
    net = build(case, layers=layers).train()
    plain = build(case, layers=layers)
    counter = CompileCounter()
    net.compile(fullgraph=True, backend=counter)
    for n, positions in enumerate(steps):
        tokens = ids(B, positions.order.shape[1], seed=n)
        loss = step(net, positions, tokens)
        assert loss == pytest.approx(step(plain, positions, tokens), abs=1e-10)
        for (name, a), b in zip(net.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                a.grad,
                b.grad,
                rtol=0,
                atol=1e-9,
                msg=name,
            )
    return counter.frame_count


@each_mechanism(KINDS)
def test_training_steps_are_one_graph_that_is_never_compiled_again(case):
    positions = TokenPositions.plain(reach_of(build(case)))
    assert graphs_of(case, [positions, positions]) == 1


@pytest.mark.parametrize("case", ["rope-yarn-auto", "alibi", "learned", "fox"])
def test_packed_steps_with_other_documents_are_one_graph(case):
    cuts = ([[4, 7], [6, 5]], [[1, 10], [11]], [[5, 3, 3], [2, 9]])
    # The largest position of a step is known on the host: at most one more graph makes it dynamic.
    assert graphs_of(case, [packed(rows, length=11) for rows in cuts]) <= 2


@each_mechanism(SCHEMES)
def test_many_lengths_share_a_bounded_number_of_graphs(case, monkeypatch):
    net = build(case, layers=1).train()
    plain = build(case, layers=1)
    counter = CompileCounter()
    for scheme in schemes_of(net):
        if "graphs" in scheme.exempt:
            pytest.skip(scheme.exempt["graphs"])
    chosen = set()

    def spy(views, v, normalizer, device, choose=model.attention.kernels.choose):
        chosen.add(choose(views, v, normalizer, device))
        return choose(views, v, normalizer, device)

    with monkeypatch.context() as patch:
        patch.setattr(model.attention.kernels, "choose", spy)
        plain(ids(B, 11))
    if chosen <= {"blocks", "explicit"}:
        pytest.skip("the CPU's blocks of queries are unrolled: one graph for each length")
    net.compile(fullgraph=True, backend=counter, dynamic=True)
    for length in (11, 10, 5):
        tokens = ids(B, length)
        close(net(tokens), plain(tokens))
    assert counter.frame_count <= 2
