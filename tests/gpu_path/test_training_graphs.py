"""Training passes with a GPU's kernels are one graph, of the whole model or of all its blocks, for
all steps.

The kernels are chosen as on a GPU and traced on a CPU. Graphs run eagerly: with `aot_eager`,
FlexAttention's backward pass returns no gradients of captured tensors on a CPU.
"""

from dataclasses import replace

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

import model.attention.kernels as kernels
import model.position.interface as base
from model import SCHEMES, TokenPositions
from tests.gpu_path.common import choose_as_on_a_gpu, flex_tests, gpu_model
from tests.model.zoo import ids, packed, reach_of

pytestmark = flex_tests


@pytest.fixture(autouse=True)
def _kernels_of_a_gpu(monkeypatch, fresh_dynamo):
    precompute = kernels.precompute_masks
    choose_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(base, "precompute_masks", lambda mask, device: precompute(mask, "cuda"))


def batches(layout: str, length: int) -> list[TokenPositions]:
    """The positions of three steps, as a loader gives them."""
    if layout == "packed":
        cuts = ((4, 6), (1, 2), (5, 3))
        return [packed([[n, length - n] for n in rows], length=length) for rows in cuts]
    plain = TokenPositions.plain(length)
    if layout == "plain":
        return [plain] * 3
    shifted = [plain.position + torch.tensor([[0], [n]]) for n in range(1, 4)]
    return [
        replace(plain, position=x, position_end=int(x.max()) + 1, unit_steps=False) for x in shifted
    ]


def train(
    case: str, layout: str, by_block: bool, layers: int = 2, narrow: bool = False
) -> list[int]:
    """The number of graphs after each step."""
    net = gpu_model(case, layers=layers)
    length = reach_of(net)
    if layout == "skipped" and net.limit is not None:
        pytest.skip("positions end with the table")
    net.train()
    net.casts_residual = narrow
    counter = CompileCounter()
    net.compile(by_block=by_block, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for n, positions in enumerate(batches(layout, length)):
        tokens = ids(2, length, seed=n)
        net.zero_grad()
        net(tokens, positions, targets=tokens.roll(1, 1)).mean().backward()
        counts.append(counter.frame_count)
    return counts


def test_training_graphs_are_not_recompiled():
    assert train("t5", "packed", by_block=False, layers=1) == [1, 1, 1]


def test_training_in_bfloat16_with_differences_of_sums_does_not_run_flex(monkeypatch):
    monkeypatch.delitem(kernels.KERNELS, "flex")
    with torch.autocast("cpu", torch.bfloat16):
        assert train("fox", "plain", by_block=False, layers=1) == [1, 1, 1]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_training_graphs_of_a_narrow_residual_stream(dtype):
    with torch.autocast("cpu", dtype):
        assert train("rope", "plain", by_block=False, layers=1, narrow=True) == [1, 1, 1]


def test_masks_capture_no_difference_of_sizes():
    """FlexAttention of torch 2.11 and 2.12 cannot compile a captured number that is symbolic and 0,
    in a bias or a mask."""
    found = []

    def backend(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        for part in graph.modules():
            if not isinstance(part, torch.fx.GraphModule):
                continue
            inputs = part.graph.find_nodes(op="placeholder")
            values = [node.meta.get("example_value") for node in inputs]
            found.extend(x for x in values if isinstance(x, torch.SymInt) and x.node.expr == 0)
        return graph

    net = gpu_model("alibi-window", layers=1).train()
    net.compile(fullgraph=True, dynamic=True, backend=backend)
    tokens = ids(2, 19)
    net(tokens, targets=tokens.roll(1, 1))
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize("by_block", [False, True], ids=["whole", "by_block"])
@pytest.mark.parametrize("layout", ["plain", "packed", "skipped"])
@pytest.mark.parametrize("case", SCHEMES)
def test_training_graphs_of_every_scheme_are_not_recompiled(case, layout, by_block):
    assert train(case, layout, by_block) == [1, 1, 1]
