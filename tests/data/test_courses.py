"""Windows of several lengths on lines that may not be there yet, against a walk over them one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.windows import courses

PLANS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=4)
LINES = st.lists(st.integers(10, 60), min_size=1, max_size=5)


def walk(sizes, plan, windows):
    """(epoch, first token) of every window in the order of the lines, course by course: by hand."""
    found, epoch, free = [], 0, 0
    for i, (length, total) in enumerate(plan):
        own = []
        while len(own) < (windows if i + 1 == len(plan) else total):
            if free + length <= sizes[epoch % len(sizes)] - 1:
                own.append((epoch, free))
                free += length
            else:
                epoch, free = epoch + 1, 0
        found.append(own)
    return found


@given(sizes=LINES, plan=PLANS, windows=st.integers(1, 20), last=st.integers(0, 8))
def test_windows_are_those_of_a_walk_and_no_line_is_asked_for_early(sizes, plan, windows, last):
    asked = set()

    def tokens(epoch):
        asked.add(epoch)
        return sizes[epoch % len(sizes)]

    lengths, totals = zip(*plan, strict=True)
    found, want = courses(tokens, lengths, totals, 3), walk(sizes, plan, windows)
    assert not asked
    for course, own in zip(found, want, strict=True):
        for index, (epoch, _) in enumerate(own):
            assert course.lies_in(index, last) == (epoch <= last)
            assert max(asked, default=0) <= last
    for course, own in zip(found, want, strict=True):
        if own:
            epochs, starts = course.locate(np.arange(len(own)))
            # A whole line of the last course is shuffled, seen or not: what is seen is part of it.
            if course is not found[-1]:
                assert sorted(zip(epochs.tolist(), starts.tolist(), strict=True)) == own
            assert epochs.tolist() == [epoch for epoch, _ in own]
