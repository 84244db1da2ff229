"""No operation mixes devices, and the host waits for the device no more often than
`host_waits.json` allows.

`host_waits.json` lists, for each activity, every module that waits and its most waits per training
step, evaluated batch or decoded token of any case. A module that is not listed never waits.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.gpu_path import host_waits
from tests.gpu_path.common import needs_patched_torch
from tests.gpu_path.fake_gpu import CUDA, FakeGpu, MixedDevices
from tests.model.zoo import CASES
from tests.processes import afresh

pytestmark = needs_patched_torch

BUDGET = json.loads(Path(__file__).with_name("host_waits.json").read_text())
# Without waits; ragged tables; a mask of two views; explicit weights; caches of sums.
QUICK = ["rope", "unit_interval-current", "rope-rerope", "cope", "fox"]
CHUNK = 20  # cases of one process


def over_budget(found: dict[str, dict[str, dict[str, int]]]) -> list[tuple[str, str, str, int]]:
    return [
        (case, activity, module, count)
        for case, activities in found.items()
        for activity, modules in activities.items()
        for module, count in modules.items()
        if count > BUDGET[activity].get(module, 0)
    ]


def test_host_syncs_are_within_budget():
    found = afresh(host_waits.measured, QUICK)
    assert over_budget(found) == []
    # The count is alive: the known waits are found.
    assert found["rope"]["evaluate whole"] == {"evaluation/scoring/text_loss.py": 1}


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(CASES), CHUNK))
def test_host_syncs_are_within_budget_in_every_case(start):
    cases = list(CASES)[start : start + CHUNK]
    assert over_budget(afresh(host_waits.measured, cases)) == []


def waits() -> list[int]:
    """After operations on the device, copies without waiting, and five that wait."""
    with FakeGpu() as gpu:
        x = torch.ones(3, device=CUDA)
        assert (x + 1).device == CUDA
        counts = [gpu.waits.total()]
        x.to("cpu", non_blocking=True)
        torch.ones(3).to(CUDA, non_blocking=True)
        counts.append(gpu.waits.total())
        _ = float(x.sum()), x.cpu(), x.nonzero(), x[x > 0], torch.ones(3).to(CUDA)
        for mixes in (lambda: x + torch.ones(3), lambda: torch.ones(3)[x.long()]):
            with pytest.raises(MixedDevices):
                mixes()
        return [*counts, gpu.waits.total()]


def test_fake_gpu_counts_syncs_and_rejects_mixed_devices():
    assert afresh(waits) == [0, 0, 5]
