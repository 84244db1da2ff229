"""FlexAttention as a GPU would run it, with gradients, against the dense kernel in float64 on a
CPU.

Eager FlexAttention computes gradients on a CPU once `_validate_device`, which forbids them, does
nothing.
"""

import pytest
import torch
import torch._dynamo
import torch.nn.attention.flex_attention as flex_module

from model.position import PositionSettings
from tests.gpu_path.common import LAYOUTS, flex_tests, gradients
from tests.model.zoo import CASES, build, ids, reach_of

pytestmark = flex_tests

# Schemes whose weights are not the softmax of a masked product. All others run as FlexAttention,
# unless their weights are entmax or have vectors of values.
EXPLICIT = {"hyperbolic", "cope", "transformer_xl", "dape", "stick_breaking", "path", "wall"}
# Every kind of mask and bias once, every layout several times: plain causality, window, sinks,
# several views, a fixed, a learned and a content bias, a sink logit, frequencies per row.
QUICK = [
    ("rope-window", "packed"),
    ("rope-sinks", "plain"),
    ("rope-dual-chunk", "ragged"),
    ("rope-yarn-auto", "ragged"),
    ("alibi-learned", "packed"),
    ("alibi-auto", "ragged"),
    ("t5", "plain"),
    ("fox", "packed"),
    ("shaw", "ragged"),
    ("pattern-fire", "ragged"),
]


@pytest.fixture(autouse=True)
def _gradients_on_a_cpu(monkeypatch, fresh_dynamo):
    # raises if torch renames it
    monkeypatch.setattr(flex_module, "_validate_device", lambda q, k, v: None)


def runs_as_flex(position: PositionSettings) -> bool:
    if position.name in EXPLICIT or position.weights == "entmax":
        return False
    return not getattr(position, "values", False)


def compare(case: str, layout: str, monkeypatch, layers: int = 2) -> None:
    net = build(case, layers=layers).train()
    length = reach_of(net)
    tokens = ids(2, length)
    positions = LAYOUTS[layout](length)
    dense, _ = gradients(net, tokens, positions, "dense", monkeypatch)
    flex, calls = gradients(net, tokens, positions, "flex", monkeypatch)
    chosen = [net.kinds[kind].position for kind in net.settings.layer_kinds]
    assert calls == sum(runs_as_flex(position) for position in chosen)
    assert flex.keys() == dense.keys()
    for name, expected in dense.items():
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(
            flex[name] / scale, expected / scale, rtol=0, atol=1e-10, msg=name
        )


@pytest.mark.parametrize(("case", "layout"), QUICK)
def test_flex_matches_dense_outputs_and_gradients(case, layout, monkeypatch):
    compare(case, layout, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_flex_matches_dense_outputs_and_gradients_in_every_case(case, layout, monkeypatch):
    compare(case, layout, monkeypatch, layers=3)
