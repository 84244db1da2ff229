"""Properties that every scheme, window and layer pattern must satisfy; the cases are in zoo.py."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import SCHEMES, TokenPositions
from model.decoding import pack
from tests.model.zoo import (
    CASES,
    EXTRAS,
    TRAIN,
    WINDOW,
    T,
    V,
    build,
    cached,
    close,
    every_case,
    every_mixer,
    ids,
    is_relative,
    packed,
    reach_of,
    schemes_of,
    shared,
    shifted,
)


@pytest.fixture(autouse=True)
def _memory_starts_as_nan():
    """Deterministic algorithms make torch fill what `torch.empty` and its like return: weights,
    caches."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def test_exemptions_name_a_check():
    """`shift`: relative to a shift of positions; `graphs`: few graphs for many lengths; `window`:
    no token beyond it is read."""
    assert set(EXTRAS) <= set(SCHEMES)
    for name in SCHEMES:
        for scheme in schemes_of(build(name)):
            assert set(scheme.exempt) <= {"shift", "graphs", "window"}, name


def test_cases_differ_past_trained_length():
    """The suite has power only if the variants it runs are not one and the same function."""
    tokens = ids(1, T)
    twins = {"rope-linear-auto", "learned-long"}  # other names of a computation
    seen: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for case in set(CASES) - twins:
            model = build(case, train=T, original=TRAIN)  # a learned table long enough for all
            seen[case] = model(tokens)[0, -1]
    for a, b in itertools.combinations(seen, 2):
        assert (seen[a] - seen[b]).abs().max() > 1e-4, f"{a} and {b} give the same logits"


def altered(tokens: torch.Tensor, columns: slice) -> torch.Tensor:
    """Other tokens in these columns."""
    changed = tokens.clone()
    changed[:, columns] = (changed[:, columns] + 3) % V
    return changed


@every_mixer
@torch.no_grad()
def test_future_is_masked(case):
    """Other tokens after t, or none at all, change no logit up to t; the token at t changes its
    own."""
    model = shared(case)
    length = reach_of(model)
    tokens = ids(2, length)
    other = ids(2, length, seed=1)
    whole = model(tokens)
    for t in (0, length // 2, length - 2):
        past = tokens[:, : t + 1]
        changed = torch.cat([past, other[:, t + 1 :]], dim=1)
        close(model(changed)[:, : t + 1], whole[:, : t + 1])
        close(model(past, TokenPositions.plain(t + 1, length=length)), whole[:, : t + 1])
        changed = altered(tokens, slice(t, t + 1))
        moved = (model(changed) - whole).abs().amax(-1)  # (B, T)
        assert (moved[:, t] > 1e-3).all()
        assert (moved[:, t + 1] > 1e-6).all()


@every_case
@torch.no_grad()
def test_relative_schemes_are_shift_invariant(case):
    model = shared(case)
    shifts = (1, 1000) if model.limit is None else (1,)
    length = reach_of(model) if model.limit is None else reach_of(model) - 1
    tokens = ids(2, length)
    is_exempt = any("shift" in scheme.exempt for scheme in schemes_of(model))
    for shift in shifts:
        moved = (model(tokens, shifted(length, shift)) - model(tokens)).abs().max()
        if is_relative(model):
            assert moved < 1e-10
        elif shift == shifts[-1] or not is_exempt:
            assert moved > 1e-3  # an absolute scheme that ignores positions would be NoPE


@every_mixer
@settings(max_examples=2)
@given(data=st.data())
def test_chunked_cache_matches_full_forward(case, data):
    model = shared(case)
    length = reach_of(model)
    tokens = ids(2, length)
    cuts = data.draw(
        st.lists(st.integers(1, length - 1), unique=True, max_size=6).map(sorted), label="cuts"
    )
    edges = [0, *cuts, length]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    with torch.no_grad():
        whole = model(tokens)
        cache = model.make_cache(2, length)
        empty = model(tokens[:, :6], TokenPositions.plain(6, length=length), cache=cache, keep=0)
        assert empty.shape == (2, 0, V)
        assert cache.filled == 6
        rest = TokenPositions.plain(length - 6, offset=6, length=length)
        close(model(tokens[:, 6:], rest, cache=cache, keep=2), whole[:, -2:])
    close(cached(model, tokens, sizes), whole)


@every_mixer
@torch.no_grad()
def test_left_padded_row_matches_unpadded_row(case):
    """Rows of different declared lengths too: a row's stretch is its own."""
    model = shared(case)
    width = reach_of(model) - 3
    counts = [width, 2, width - 5, 3]
    lengths = [count + 3 for count in counts]
    # row r's text stands at its right end, the decoded three tokens last
    tokens = ids(4, width + 3)
    alone = [
        model(tokens[r : r + 1, width - count :], TokenPositions.plain(count + 3))[0]
        for r, count in enumerate(counts)
    ]

    positions = TokenPositions.left_padded(counts, width, lengths=lengths)
    whole = model(tokens[:, :width], positions)
    for r, count in enumerate(counts):
        close(whole[r, width - count :], alone[r][:count])
    changed = altered(tokens[:, :width], slice(0, width - 3))  # padding of the last row
    close(model(changed, positions)[3, -3:], whole[3, -3:], atol=0)

    model = pack(copy.deepcopy(model))
    cache = model.make_cache(4, width + 3)
    prompt = model(tokens[:, :width], positions, cache=cache, keep=1)
    for r, count in enumerate(counts):
        close(prompt[r, 0], alone[r][count - 1])
    for step in range(3):
        positions = TokenPositions.left_padded(counts, 1, offset=width + step, lengths=lengths)
        out = model(tokens[:, width + step : width + step + 1], positions, cache=cache)
        for r, count in enumerate(counts):
            close(out[r, 0], alone[r][count + step])


@every_mixer
@settings(max_examples=2)
@given(data=st.data())
def test_packed_documents_equal_separate_documents(case, data):
    model = shared(case)
    cuts = data.draw(
        st.lists(st.integers(1, TRAIN), min_size=2, max_size=4), label="lengths of row 0"
    )
    total = sum(cuts)
    rows = [cuts, cuts[::-1]]
    tokens = ids(2, total + 2)
    positions = packed(rows, length=TRAIN, pad=2)
    with torch.no_grad():
        out = model(tokens, positions)
        cache = model.make_cache(2, total + 2)
        edges = [0, total // 3, total // 2 + 1, total + 2]
        parts = [
            model(tokens[:, start:stop], positions.part(start, stop), cache=cache)
            for start, stop in itertools.pairwise(edges)
            if start < stop
        ]
        close(torch.cat(parts, dim=1)[:, :total], out[:, :total])
        for r, lengths in enumerate(rows):
            start = 0
            for count in lengths:
                piece = tokens[r : r + 1, start : start + count]
                close(
                    out[r, start : start + count],
                    model(piece, TokenPositions.plain(count, length=TRAIN))[0],
                )
                start += count


@every_mixer
@torch.no_grad()
def test_kept_positions_equal_tail_of_full_forward(case):
    model = shared(case)
    length = reach_of(model)
    tokens = ids(2, length)
    positions = TokenPositions.plain(length)
    whole = model(tokens, positions)
    for keep in (length, length - 1, 6, 1):
        out = model(tokens, positions, keep=keep)
        assert out.shape == (2, keep, V)
        close(out, whole[:, length - keep :])
    ragged = TokenPositions.left_padded([length, 4], length)
    close(model(tokens, ragged, keep=3), model(tokens, ragged)[:, -3:])
    both = packed([[4, length - 4], [3, length - 3]])
    close(model(tokens, both, keep=length - 5), model(tokens, both)[:, 5:])


@every_mixer
def test_every_parameter_receives_a_gradient(case):
    model = build(case, train=T).train()
    length = reach_of(model, V)
    tokens = torch.stack([torch.arange(length), (torch.arange(length) + V // 2) % V])
    # Documents side by side: hidden pairs have negative distances, whose gradient may not be NaN.
    beside = packed([[7, length - 9], [length - 9, 7]], pad=2)
    model(tokens, beside, targets=tokens.flip(1)).mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is None or torch.isfinite(p.grad).all(), f"{name}, in packed documents"
        p.grad = None
    model(tokens, targets=tokens.flip(1)).mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        if p.ndim == 2 and name != "embed.weight" and not name.startswith("position."):
            assert (p.grad.abs().amax(1) > 0).all(), f"a row of {name} learns nothing"
        assert p.grad.abs().max() > 1e-8, f"{name} learns nothing"


@every_mixer
@torch.no_grad()
def test_state_dict_round_trips(case, tmp_path):
    model = build(case)
    torch.save(model.state_dict(), tmp_path / "weights")
    other = build(case, seed=5)
    tokens = ids(2, TRAIN)
    assert (model(tokens) - other(tokens)).abs().max() > 1e-3
    other.load_state_dict(torch.load(tmp_path / "weights", weights_only=True), strict=True)
    close(other(tokens), model(tokens), atol=0)
    # No table, mask or other derived number travels with the weights.
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("name", SCHEMES)
@torch.no_grad()
def test_window_counts_the_query_itself(name):
    """One layer, window w: the query at t reads tokens t − w + 1 to t and no other; where a scheme
    says that its notes of those read farther, none another window back."""
    model = build({"name": name, "window": WINDOW}, layers=1)
    is_exempt = any("window" in scheme.exempt for scheme in schemes_of(model))
    farther = range(WINDOW, 2 * WINDOW) if is_exempt else ()
    length = reach_of(model)
    tokens = ids(1, length)
    t = length - 2
    ragged = TokenPositions.left_padded([length], length)
    for positions in (TokenPositions.plain(length), ragged, packed([[length]])):
        whole = model(tokens, positions)[0, t]
        for back in set(range(t + 1)) - set(farther):
            changed = altered(tokens, slice(t - back, t - back + 1))
            moved = (model(changed, positions)[0, t] - whole).abs().max()
            assert (moved > 1e-9) == (back < WINDOW), f"{positions.layout}: token {back} back"
