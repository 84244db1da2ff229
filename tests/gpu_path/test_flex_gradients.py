"""FlexAttention as a GPU would run it, with gradients, against the dense kernel in float64 on a
CPU.

Eager FlexAttention computes gradients on a CPU once `_validate_device`, which forbids them, does
nothing.
"""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo
import torch.nn.attention.flex_attention as flex_module

from model import TokenPositions
from model.attention import flex
from model.attention.kernels import attend
from model.attention.mask import AttentionView, Normalizer
from model.position import PositionSettings
from model.position.schemes import fire
from tests.gpu_path.common import LAYOUTS, flex_tests, gradients
from tests.model.alone import context_of, drawn, normal, scheme_of
from tests.model.zoo import CASES, H, build, close, ids, packed, reach_of

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


def compare(case: str | dict, layout: str, monkeypatch, layers: int = 2) -> None:
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


@pytest.mark.parametrize("window", [None, 6])
def test_gradients_of_fire_in_blocks(window, monkeypatch):
    """Queries before and after the threshold, several blocks of a diagonal at once."""
    monkeypatch.setattr(flex, "BLOCK", 4)
    monkeypatch.setattr(flex, "PAIRS_AT_ONCE", 3 * 2 * H * 4 * 4)
    monkeypatch.setattr(fire, "fire_gradient", Mock(wraps=fire.fire_gradient))
    position = {"name": "fire", "init_length": 6.0, "width": 7, "window": window}
    compare(position, "plain", monkeypatch, layers=1)
    fire.fire_gradient.assert_called_once()


@pytest.mark.parametrize(
    ("layout", "t", "s", "window", "sink"),
    [
        ("plain", 23, 23, None, False),
        ("plain", 9, 30, None, True),
        ("plain", 16, 16, 6, True),
        ("plain", 17, 31, 14, False),
        ("plain", 8, 20, 2, True),
        ("packed", 23, 23, None, True),
        ("packed", 23, 23, 5, False),
    ],
)
def test_gradients_of_a_table_by_distance(layout, t, s, window, sink, monkeypatch):
    """Against the dense kernel, in blocks of 4: several diagonals, queries that are not the first
    tokens, and lengths that are no multiple of a block."""
    monkeypatch.setattr(flex, "BLOCK", 4)
    monkeypatch.setattr(flex, "PAIRS_AT_ONCE", 3 * 2 * H * 4 * 4)  # three blocks
    table = normal(H, s + 3, seed=5).requires_grad_()
    positions = TokenPositions.plain(s)
    if layout == "packed":
        positions = packed([[9, s - 9], [s - 2, 2]])
    scheme = scheme_of("none", window=window)
    context = context_of(scheme, positions.last(t), positions)
    mask = context.distance_mask(lambda h, d: table[h, d.clamp(min=0)], tabulate=True)
    sinks = normal(H, seed=6).requires_grad_() if sink else None
    leaves = [x.requires_grad_() for x in drawn(t, s)]
    q, k, v = leaves
    views = [AttentionView(q, k, mask)]
    inputs = [*leaves, table] + ([] if sinks is None else [sinks])
    found = []
    for kernel in ("dense", "flex"):
        out = attend(views, v, 0.3, kernel, Normalizer(sinks))
        found.append((out, *torch.autograd.grad((out * normal(*out.shape, seed=7)).sum(), inputs)))
    for expected, ours in zip(*found, strict=True):
        close(ours, expected, atol=1e-11)
    assert mask.learned_table() is not None


def test_scores_of_other_documents_do_not_overflow(monkeypatch):
    """A query's score with a key of another document may exceed its log-sum-exp by any number."""
    monkeypatch.setattr(flex, "BLOCK", 4)
    q, k, v, grad, out = (normal(1, 1, 8, 4, seed=n).float() for n in range(5))
    k[:, :, :4] = 1e4 * q[:, :, 4:]
    log = (q * k).sum(-1).masked_fill(torch.arange(8) < 4, 1e6)
    document = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    table = torch.zeros(1, 8)
    found = flex.table_gradient(grad, out, log, q, k, v, table, document, 1.0, None)
    assert found.isfinite().all()


@pytest.mark.parametrize("case", ["skipped", "sinks", "fixed"])
def test_tables_without_a_pass_of_their_own(case):
    """Where distances do not follow from indices, in cached sinks, and without a gradient."""
    positions = TokenPositions.plain(9)
    if case == "skipped":
        positions = replace(positions, position=2 * positions.position, unit_steps=False)
    limits = {"window": 4, "sinks": 2} if case == "sinks" else {}
    context = context_of(scheme_of("none", **limits), positions)
    table = normal(H, 20).requires_grad_(case != "fixed")
    mask = context.distance_mask(lambda h, d: table[h, d.clamp(min=0)], tabulate=True)
    assert mask.learned_table() is None
