"""Activation checkpointing and compilation by block do not change results."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from model import SCHEMES, TokenPositions
from model.block import Block, Checkpointing
from tests.model.zoo import GATED, build, each_mechanism, ids, packed
from training.memory_estimate import MemoryLayout, activations

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

B = 2
T = 11
CUTS = [[4, 7], [6, 5]]
CPU = torch.profiler.ProfilerActivity.CPU
# A rotation, a factor in each layer's softmax, what is learned for the model, and in each layer.
QUICK = [("rope", "selective"), ("none-ssmax", "full"), ("kerple-log3", "none"), ("fox", "full")]


def gradients(net, positions: TokenPositions, seed: int = 0) -> dict[str, torch.Tensor]:
    net.zero_grad()
    tokens = ids(B, T, seed)
    net(tokens, positions, targets=tokens.roll(1, 1)).mean().backward()
    return {name: weight.grad for name, weight in net.named_parameters()}


@pytest.fixture
def passes(monkeypatch) -> list:
    """Grows by one with every block that is computed."""
    seen = []
    compute = Block._forward

    def counted(self, *args):
        seen.append(self)
        return compute(self, *args)

    monkeypatch.setattr(Block, "_forward", counted)
    return seen


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@each_mechanism([*SCHEMES, *GATED, "none-ssmax", "rope-window", "rope-self-extend", "fire-shared"])
def test_activation_checkpointing_gradients_match(case, checkpointing, passes):
    net = build(case).train()
    again = build(case).train()
    again.checkpoint_blocks(checkpointing)
    for positions in (TokenPositions.plain(T), packed(CUTS)):
        want = gradients(net, positions)
        once = len(passes)
        found = gradients(again, positions)
        assert len(passes) - once == 2 * once
        assert all(found[name].equal(want[name]) for name in want)
        passes.clear()
    again.eval()
    again(ids(B, T), targets=ids(B, T)).mean().backward()
    assert len(passes) == len(again.layers)


def kept_bytes(checkpointing: Checkpointing, layers: int) -> int:
    """Bytes allocated in a forward pass and not freed."""
    net = build("rope", dtype=torch.float32, layers=layers).train()
    net.checkpoint_blocks(checkpointing)
    tokens = ids(B, T)
    positions = TokenPositions.plain(T)
    net(tokens, positions)  # fills tables
    # Without acc_events, torch 2.11 warns that events of earlier cycles are dropped.
    with torch.profiler.profile(activities=[CPU], profile_memory=True, acc_events=True) as seen:
        out = net(tokens, positions)
    assert out.requires_grad
    return sum(event.self_cpu_memory_usage for event in seen.events())


@pytest.mark.parametrize("checkpointing", ["full", "selective", "none"])
def test_stored_activations_match_the_forecast(checkpointing):
    """In float32, to the byte: two layers more store twice the formula's activations more."""
    layout = MemoryLayout(1, False, B, checkpointing, half=False)
    few = activations(build("rope", layers=1), T, layout)
    many = activations(build("rope", layers=3), T, layout)
    kept = kept_bytes(checkpointing, 3) - kept_bytes(checkpointing, 1)
    assert kept == B * T * (many - few)


@pytest.mark.parametrize(("case", "checkpointing"), QUICK)
# Dynamo's own look
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_share_one_graph(case, checkpointing):
    net = build(case).train()
    plain = build(case).train()
    counter = CompileCounter()
    net.checkpoint_blocks(checkpointing)
    net.compile(by_block=True, fullgraph=True, backend=counter)
    for seed in range(3):
        want = gradients(plain, TokenPositions.plain(T), seed)
        for name, grad in gradients(net, TokenPositions.plain(T), seed).items():
            torch.testing.assert_close(
                grad,
                want[name],
                rtol=0,
                atol=1e-9,
                msg=name,
            )
    assert counter.frame_count == 1, "the layers do not share their graph, or steps compile anew"
