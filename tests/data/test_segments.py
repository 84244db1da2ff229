"""Windows of several lengths from a token stream that is still growing, against a plain loop."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.sampling.segments import FEW, ChunkLayout, window_samplers

LENGTHS = st.sampled_from([1, 2, 3, 4, 6, 7, 12])
PLANS = st.lists(st.tuples(LENGTHS, st.integers(0, 40)), min_size=1, max_size=4)
# too short for slots of several windows of 12
LINES = st.lists(st.integers(13, 90), min_size=1, max_size=5)


def walk(sizes, plan, windows):
    """The epoch of every window, course by course: slot after slot, each filled before the next."""
    slot = max(length for length, _ in plan)
    found = []
    epoch = 0
    used = 0
    for i, (length, total) in enumerate(plan):
        expected = windows if i + 1 == len(plan) else total
        own = []
        while len(own) < expected:
            if used == (sizes[epoch % len(sizes)] - 1) // slot:
                epoch = epoch + 1
                used = 0
            own += [epoch] * (slot // length)
            used += 1
        found.append(own[:expected])
    return found


@given(sizes=LINES, plan=PLANS, windows=st.integers(1, 40), last=st.integers(0, 8))
def test_windows_match_sequential_walk_with_lazy_reads(sizes, plan, windows, last):
    asked = set()

    def tokens(epoch):
        asked.add(epoch)
        return sizes[epoch % len(sizes)]

    lengths, totals = zip(*plan, strict=True)
    found = window_samplers(tokens, lengths, totals, 3)
    want = walk(sizes, plan, windows)
    assert not asked
    for sampler, own in zip(found, want, strict=True):
        for index, epoch in enumerate(own):
            assert sampler.is_within(index, last) == (epoch <= last)
            assert max(asked, default=0) <= last
    seen = set()  # (epoch, input)
    for length, sampler, own in zip(lengths, found, want, strict=True):
        epochs, starts = sampler.locate(np.arange(len(own)))
        assert epochs.tolist() == own
        one_by_one = [sampler.locate(np.array([n])) for n in range(len(own))]
        assert [int(start[0]) for _, start in one_by_one] == starts.tolist()
        for epoch, start in zip(own, starts.tolist(), strict=True):
            inputs = {(epoch, at) for at in range(start, start + length)}
            assert not inputs & seen and start >= 0 and start + length < sizes[epoch % len(sizes)]
            seen |= inputs


def test_little_text_is_dropped_for_any_lengths():
    for lengths in (
        [256],
        [128, 384, 64, 32, 384, 128],
        [512, 1536, 256],
        [100, 101, 103],
        [384, 512],
    ):
        slots = ChunkLayout.of(10**6, lengths)
        assert all(slots.size % length < slots.size / 16 for length in lengths), lengths
        assert slots.count == (10**6 - 1) // slots.size
        short = ChunkLayout.of(
            FEW * max(lengths), lengths
        )  # of windows that fill them all, there would be few
        assert short.size == max(lengths) and short.count == FEW - 1
    assert (
        ChunkLayout.of(10**6, [256]).size == 256
        and ChunkLayout.of(10**6, [128, 384, 64, 32]).size == 384
    )
    assert ChunkLayout.of(10**6, [384, 512]) == (1536, 651)


def test_short_stage_samples_the_whole_stream():
    """A tenth of a line in windows of an eighth of a slot, first or last: its starts are spread evenly."""
    slots = 1000
    plans = {0: [(16, 800), (128, 900)], 1: [(128, 900), (16, 800)]}
    for which, plan in plans.items():
        lengths, totals = zip(*plan, strict=True)
        sampler = window_samplers(lambda _: slots * 128 + 1, lengths, totals, 5)[which]
        epochs, starts = sampler.locate(np.arange(800))
        assert (epochs == 0).all()
        tenths = np.bincount(starts * 10 // (slots * 128), minlength=10) / 800
        assert tenths.min() > 0.03 and tenths.max() < 0.2  # 100 slots a tenth: 0.1 ± 0.03
        # Neighbors of one slot are not read in a row.
        same = starts[1:] // 128 == starts[:-1] // 128
        assert same.mean() < 0.05
