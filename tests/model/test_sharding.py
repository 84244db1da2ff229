"""Windows that are sharded over processes: loss and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from model import ContextShard, TokenPositions, Transformer
from tests import processes
from tests.model.linear import LEGAL, linear
from tests.model.zoo import CASES, build, ids

ROWS, LENGTH = 2, 16
MIXERS = [f"{form} {name}" for form in ("numerator", "cosine") for name in LEGAL]
Result = dict[str, float | torch.Tensor]


def model_of(case: str) -> Transformer:
    form, _, scheme = case.partition(" ")
    return (linear(scheme, form) if scheme else build(case)).train()


def positions_of(layout: str, length: int) -> TokenPositions:
    """Plain, or documents that begin within and between the chunks; two rows that differ."""
    if layout == "plain":
        return TokenPositions.plain(length)
    begins = torch.zeros(ROWS, length, dtype=torch.bool)
    begins[0, [0, 3, length // 2, length - 1]] = True
    begins[1, [0, length // 4 + 1]] = True
    where = torch.arange(length).expand(ROWS, -1)
    order = where - torch.where(begins, where, 0).cummax(1).values
    return TokenPositions(order, order, begins.cumsum(1) - 1, "packed", length, (length,))


def result(case: str, layout: str, shard: ContextShard | None = None) -> Result:
    """The sum of the NLL of this process's targets, and its gradients."""
    model = model_of(case)
    length = LENGTH if model.limit is None else min(LENGTH, model.limit // 8 * 8)
    tokens = ids(ROWS, length + 1)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 2] = -100
    if shard is not None:
        inputs, targets = shard.select(inputs), shard.select(targets)
    nll = model(inputs, positions_of(layout, length), targets, shard=shard)
    nll.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"nll": nll.detach().sum(), **gradients}


def in_groups(world: int, cases: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Result]:
    """The results of every case, summed over the ranks of one group."""

    def work() -> dict:
        dist.init_process_group("gloo")
        shard = ContextShard(dist.get_rank(), world, dist.group.WORLD.group_name)
        found = {case: result(*case, shard) for case in cases}
        dist.barrier()
        dist.destroy_process_group()
        return {case: {name: x.numpy() for name, x in each.items()} for case, each in found.items()}

    ranks = processes.together(world, work)
    for answer in ranks:
        if isinstance(answer, BaseException):
            raise answer
    return {
        case: {name: sum(torch.from_numpy(rank[case][name]) for rank in ranks) for name in ranks[0][case]}
        for case in ranks[0]
    }


def check(world: int, cases: list[tuple[str, str]]) -> None:
    wrong = {}
    for case, found in in_groups(world, cases).items():
        expected = result(*case)
        assert found.keys() == expected.keys()
        far = max(float((found[name] - expected[name]).abs().max()) for name in expected)
        if not far < 1e-10:
            wrong[case] = far
    assert not wrong


def test_every_scheme():
    check(2, [(case, layout) for case in [*CASES, *MIXERS] for layout in ("plain", "packed")])
