"""Windows of several lengths from a token stream, against a plain loop."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.sampling.window_order import StepRange, chunk_size, samples_before, window_samplers

LENGTHS = st.sampled_from([1, 2, 3, 4, 6, 7, 12])
PLANS = st.lists(st.tuples(LENGTHS, st.integers(0, 40)), min_size=1, max_size=4)


def walk(tokens, plan, windows):
    """The epoch of every window: chunk after chunk, each filled before the next."""
    chunk = max(length for length, _ in plan)
    epochs = []
    used = 0  # chunks
    for i, (length, total) in enumerate(plan):
        own = []
        while len(own) < (windows if i + 1 == len(plan) else total):
            own += [used // ((tokens - 1) // chunk)] * (chunk // length)
            used += 1
        epochs.append(own[: windows if i + 1 == len(plan) else total])
    return epochs


# too few tokens for chunks of several windows of 12
@given(tokens=st.integers(13, 90), plan=PLANS, windows=st.integers(1, 40))
def test_windows_match_sequential_walk(tokens, plan, windows):
    lengths, totals = zip(*plan, strict=True)
    samplers = window_samplers(tokens, lengths, totals, seed=3)
    seen = set()  # (epoch, input)
    for length, sampler, own in zip(lengths, samplers, walk(tokens, plan, windows), strict=True):
        epochs, starts = sampler.locate(np.arange(len(own)))
        assert epochs.tolist() == own
        one_by_one = [sampler.locate(np.array([n])) for n in range(len(own))]
        assert [int(start[0]) for _, start in one_by_one] == starts.tolist()
        for epoch, start in zip(own, starts.tolist(), strict=True):
            inputs = {(epoch, at) for at in range(start, start + length)}
            assert not inputs & seen
            assert start >= 0
            assert start + length < tokens
            seen |= inputs


def test_64_chunks_are_not_few():
    """Chunks of 12 tokens hold windows of 3 and 4; shorter streams have chunks of 4."""
    assert chunk_size(64 * 12 + 1, [3, 4]) == 12
    assert chunk_size(64 * 12, [3, 4]) == 4


# the first and the last may be the same object
STEP_RANGES = st.lists(
    st.builds(StepRange, LENGTHS, st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3
).map(lambda ranges: [*ranges, ranges[0]])


@given(STEP_RANGES, st.integers(0, 20))
def test_samples_before_a_step(plan, step):
    """Against counting step by step, the last range without an end."""
    sizes = [(length, size) for length, size, steps in plan for _ in range(steps)]
    sizes += [plan[-1][:2]] * 20
    groups = []
    for number, (length, size) in enumerate(sizes[: step + 1]):
        if not groups or groups[-1][0] != length:
            groups.append((length, size, 0))
        groups[-1] = (length, size, groups[-1][2] + (size if number < step else 0))
    assert samples_before(plan, step) == groups
