"""States that training carries from window to window: equal to one long pass, with gradients within
each window."""

import copy
import itertools

import pytest
import torch
from torch import Tensor

from model import ModelError, TokenPositions, Transformer
from model.carried_state import CarriedState, check_carried
from tests.model.zoo import RECURRENT, WINDOW, build, close, ids, packed, settings_of

WINDOWS = 9
LENGTH = 8  # tokens of a window
# Row 0 has a document over several windows, and one that begins with a window.
CUTS = [[3, 30, 31, 2, 6], [40, 1, 31]]
ATTENTION = [
    *("rope", "alibi", "fox", "cope", "path", "transformer_xl", "kerple", "none-entmax"),
    *("learned_rope", "clex"),
]
CASES = [
    *(f"{name}-rope" for name in RECURRENT),
    "linear-numerator-rope",
    "linear-learned_rope",
    "short_convolution-none",
    "hybrid",
    *(name for name in ATTENTION),
    "latent",
    "rope-shifted",
]


def model_of(case: str) -> Transformer:
    if case == "latent":
        mixer = {"name": "latent", "rank": 7, "unrotated_dim": 4}
        return build({"name": "rope", "window": WINDOW}, mixer=mixer, kv_heads=1)
    if case == "rope-shifted":
        return build({"name": "rope", "window": WINDOW, "fraction": 0.5, "shifted_keys": 0.5})
    if case == "linear-learned_rope":
        return build({"name": "learned_rope"}, mixer={"name": "linear", "chunk": 4})
    if case == "none-entmax":
        return build({"name": "none", "window": WINDOW, "weights": "entmax"})
    return build({"name": case, "window": WINDOW} if case in ATTENTION else case)


def in_windows(model: Transformer, tokens: Tensor, positions: TokenPositions) -> list[Tensor]:
    """(B, T, V) logits of each window."""
    carried: dict[str, Tensor] = {}
    out = []
    for start in range(0, tokens.shape[1], LENGTH):
        state = CarriedState(model.settings, carried)
        part = positions.part(start, start + LENGTH)
        out.append(model(tokens[:, start : start + LENGTH], part, cache=state))
        carried = state.after()
        assert all(len(x) == 2 and not x.requires_grad for x in carried.values())
    return out


@pytest.mark.parametrize("case", CASES)
def test_windows_equal_one_long_pass(case):
    """And other tokens in one document change no number of the next."""
    model = model_of(case).train()
    tokens = ids(2, LENGTH * WINDOWS)
    positions = packed(CUTS)
    out = torch.cat(in_windows(model, tokens, positions), dim=1)
    with torch.no_grad():  # as in evaluation: frequencies of the declared length
        close(out, model(tokens, positions))
    changed = tokens.clone()
    changed[0, 3:33] = (changed[0, 3:33] + 5) % 37
    other = torch.cat(in_windows(model, changed, positions), dim=1)
    close(other[1], out[1], atol=0)
    close(other[0, 33:], out[0, 33:], atol=0)
    assert (other[0, 3:33] - out[0, 3:33]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("windows", [(WINDOW, 2), (2, WINDOW)])
@torch.no_grad()
def test_window_of_attention_changes_between_windows(windows):
    """Keys of the only layer do not depend on the window, which a stage of training may change."""
    model = build({"name": "fox", "window": windows[0]}, layers=1).train()
    tokens = ids(2, LENGTH * 2)
    positions = packed([[2 * LENGTH], [3, 2 * LENGTH - 3]])
    state = CarriedState(model.settings, {})
    model(tokens[:, :LENGTH], positions.part(0, LENGTH), cache=state)
    model.reposition(build({"name": "fox", "window": windows[1]}, layers=1).settings)
    after = CarriedState(model.settings, state.after())
    out = model(tokens[:, LENGTH:], positions.part(LENGTH, 2 * LENGTH), cache=after)
    reached = slice(0, None) if windows[1] < windows[0] else slice(WINDOW - windows[0], None)
    close(out[:, reached], model(tokens, positions)[:, LENGTH:][:, reached])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("case", "form"),
    [
        *itertools.product(("gated_deltanet-rope", "hybrid", "fox"), ("full", "selective")),
        ("gated_deltanet-rope", "compiled"),
        ("fox", "compiled blocks"),
        ("rope-shifted", "compiled blocks"),
        ("learned_rope", "compiled"),
    ],
)
def test_recomputed_and_compiled_passes(case, form, fresh_dynamo):
    """Equal gradients of each window, with the states before it as constants."""
    expected = model_of(case).train()
    model = copy.deepcopy(expected)
    if form in ("full", "selective"):
        model.checkpoint_blocks(form)
    else:
        model.compile(by_block=form == "compiled blocks", backend="eager")
    tokens = ids(2, LENGTH * 3)
    positions = packed([[20, 4], [9, 15]])
    for each in (expected, model):
        for logits in in_windows(each, tokens, positions):
            logits.square().sum().backward()
    for (name, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert a.grad is not None, name
        assert a.grad.abs().max() > 1e-6, name
        close(b.grad, a.grad, atol=1e-8)


@pytest.mark.parametrize(
    "position", [{"name": "rope"}, {"name": "rope", "window": 4, "sinks": 1}], ids=str
)
def test_attention_to_all_tokens_is_refused(position):
    with pytest.raises(ModelError, match=r"model.position.window"):
        check_carried(settings_of(position))
