"""The number of graphs FlexAttention compiles to, counted on a CPU with a backend that only counts.

torch.compile keeps at most `recompile_limit` graphs of a function and then runs it eagerly, where
FlexAttention takes O(T²) memory.
"""

import pytest
import torch
import torch._dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounter

import model.attention.flex as flex
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import TokenPositions, Transformer
from tests.gpu_path.common import choose_as_on_a_gpu, flex_tests, gpu_model
from tests.model.zoo import CASES, ids, packed

pytestmark = flex_tests

POSITIONS = {
    "plain": TokenPositions.plain(16),
    "longer": TokenPositions.plain(24),
    "ragged": TokenPositions.left_padded([17, 5], 17),
    "packed": packed([[4, 12], [9, 7]]),
}


@pytest.fixture
def counters(monkeypatch, fresh_dynamo):
    """Choose kernels and compile them as on a GPU; how often each compiled function was traced."""
    made: list[tuple[str, CompileCounter]] = []
    compile_ = torch.compile
    fused = flex.fused

    def counted(function, **options):
        counter = CompileCounter()
        made.append((function.__name__, counter))
        return compile_(function, backend=counter, **options)

    monkeypatch.setattr(torch, "compile", counted)
    choose_as_on_a_gpu(monkeypatch)
    on_gpu = torch.device("cuda")
    monkeypatch.setattr(
        flex, "fused", lambda f, device, *more, **keys: fused(f, on_gpu, *more, **keys)
    )
    flex._compiled.cache_clear()
    yield made
    flex._compiled.cache_clear()


def evaluate(net: Transformer, layouts: list[str], gradients: bool = False) -> None:
    for layout in layouts:
        positions = POSITIONS[layout]
        length = positions.order.shape[1]
        if net.limit is None or length <= net.limit:
            with torch.set_grad_enabled(gradients):
                logits = net(ids(2, length), positions)
            if gradients:
                logits.sum().backward()


def generate(net: Transformer, *prompts: list[int]) -> None:
    for _ in Generation(net, prompts, 4, SamplingParams(temperature=0)):
        pass


def graphs(made: list[tuple[str, CompileCounter]], function: str) -> list[int]:
    return [counter.frame_count for name, counter in made if name == function]


def test_graphs_of_evaluation_and_generation(counters):
    net = gpu_model("alibi", layers=1)
    evaluate(net, ["plain", "longer", "ragged"])
    generate(net, [1, 2, 3], [4, 5, 6])
    for function in ("flex_attention", "create_block_mask"):
        assert 2 <= sum(graphs(counters, function)) <= 4


def test_exceeding_the_recompile_limit_is_an_error(counters, monkeypatch):
    monkeypatch.setattr(flex, "RECOMPILE_LIMIT", 1)
    net = gpu_model("alibi", layers=1)
    other = gpu_model("alibi", torch.bfloat16, layers=1)
    limit = torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(recompile_limit=limit):  # restores it
        evaluate(net, ["plain"])
        with pytest.raises(FailOnRecompileLimitHit):
            evaluate(other, ["plain"])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_case_stays_below_the_recompile_limit(case, counters):
    net = gpu_model(case, layers=len(CASES[case].get("layers", "1")))
    evaluate(net, list(POSITIONS))
    evaluate(net, list(POSITIONS), gradients=True)
    generate(net, [1, 2, 3], [4, 5, 6])
    generate(net, [1, 2, 3], [4])
    for function in ("flex_attention", "create_block_mask"):
        assert max(graphs(counters, function), default=0) < flex.RECOMPILE_LIMIT / 4
