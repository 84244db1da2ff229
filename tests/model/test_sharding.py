"""Windows that are sharded over processes: loss and gradients are those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from errors import ModelError
from model import ContextShard, TokenPositions, Transformer
from model.sharding import ShardedWindow
from tests import processes
from tests.collectives import CollectiveCounter
from tests.model.zoo import CASES, LAYERS, MIXER_CASES, D, G, H, build, ids, settings_of

ROWS = 2
LENGTHS = {"plain": 19, "packed": 16}  # chunks of unequal and of equal lengths
Result = dict[str, float | torch.Tensor]


def model_of(case: str) -> Transformer:
    return build(case).train()


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


def window_of(model: Transformer, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ROWS, L) inputs and targets."""
    length = min(LENGTHS[layout], model.limit or 19)
    tokens = ids(ROWS, length + 1)
    return tokens[:, :-1], tokens[:, 1:].clone()


def result(case: str, layout: str, shard: ContextShard | None = None) -> Result:
    """The sum of the NLL of this process's targets, and its gradients."""
    model = model_of(case)
    inputs, targets = window_of(model, layout)
    length = inputs.shape[1]
    targets[0, 2] = -100
    if shard is not None:
        inputs = shard.select(inputs)
        targets = shard.select(targets)
    nll = model(inputs, positions_of(layout, length), targets, shard=shard)
    nll.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"nll": nll.detach().sum(), **gradients}


def read(
    case: str, layout: str, keep: int | None, shard: ContextShard | None = None
) -> torch.Tensor:
    """(ROWS, L) NLL of the last `keep` tokens without gradients, 0 for the tokens of other
    processes."""
    model = model_of(case).eval()
    inputs, targets = window_of(model, layout)
    length = inputs.shape[1]
    index = torch.arange(length)[None]
    if shard is not None:
        shard = shard.divided(length, 2)
        inputs, targets, index = (shard.select(x) for x in (inputs, targets, index))
    index = index[0, index[0] >= length - (keep or length)]
    targets = targets[:, targets.shape[1] - len(index) :]
    count = None if keep is None else len(index)
    with torch.no_grad():
        found = model(inputs, positions_of(layout, length), targets, keep=count, shard=shard)
    return torch.zeros(ROWS, length, dtype=torch.float64).index_copy(1, index, found)


def results(case: str, layout: str, shard: ContextShard | None = None) -> Result:
    """Of a training pass and of passes without gradients."""
    reads = {f"read {keep}": read(case, layout, keep, shard) for keep in (5, None)}
    return result(case, layout, shard) | reads


def in_groups(world: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Result]:
    """The results of every case, summed over the ranks of one group."""

    def work() -> dict:
        dist.init_process_group("gloo")
        shard = ContextShard.of(dist.group.WORLD)
        found = {case: results(*case, shard) for case in cases}
        dist.barrier()
        dist.destroy_process_group()
        return {case: {name: x.numpy() for name, x in each.items()} for case, each in found.items()}

    ranks = processes.together(world, work, 1200)
    totals = {}
    for case in cases:
        first, *others = [rank[case] for rank in ranks]
        totals[case] = {name: torch.from_numpy(x) for name, x in first.items()}
        for other in others:
            for name, x in other.items():
                totals[case][name] += torch.from_numpy(x)
    return totals


def check(world: int, cases: list[tuple[str, str]]) -> None:
    for case, found in in_groups(world, cases).items():
        expected = results(*case)
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(
                found[name],
                x,
                rtol=0,
                atol=1e-10,
                msg=f"{case}: {name}",
            )


# Every mechanism: keys, windows, sinks, extras, states and layers of several kinds. All schemes are
# in the slow test.
QUICK = [
    ("rope-lambda", "plain"),
    ("path", "plain"),
    ("linear-cosine-pattern", "plain"),
    ("latent-rope", "plain"),
    ("hybrid-window", "plain"),
    ("rope-sinks", "packed"),
    ("fox-window", "packed"),
    ("rope-shifted", "packed"),
    ("alibi-nape", "plain"),
    ("linear-numerator-rope", "packed"),
    ("gated_deltanet-rope", "packed"),
    ("hybrid-heads", "packed"),
]


def test_loss_and_gradients_equal_those_of_one_process():
    check(2, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_every_scheme_equals_one_process(world, layout):
    check(world, [(case, layout) for case in [*CASES, *MIXER_CASES]])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("case", "tensors", "numbers", "constants"),
    [
        ("rope", 2, lambda chunks: 16 * 2 * G * D, 0),
        ("fox", 3, lambda chunks: 16 * (2 * G * D + H), 0),
        ("linear-numerator-rope", 1, lambda chunks: chunks * 2 * H * D * D, 2 * H),
    ],
)
def test_communication_is_that_of_the_formula(world, case, tensors, numbers, constants):
    """docs/context_sharding.md; rank 0 of a process group that communicates nothing."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        shard = ContextShard.of(dist.group.WORLD)
        with CollectiveCounter() as counted:
            result(case, "packed", shard)
    finally:
        dist.destroy_process_group()
    # in two passes; float64
    passes = LAYERS * 2
    nbytes = LAYERS * ROWS * 8
    assert counted.counts == {
        "all-gather": (
            passes * (tensors + bool(constants)),
            nbytes * (numbers(2 * world) + 2 * world * constants),
        ),
        "reduce-scatter": (passes * tensors, nbytes * numbers(2 * world)),
    }


class CollectiveOrder(TorchDispatchMode):
    """Records when gathers start, and when their results are waited for."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name().partition("::")[2]
        if name in ("all_gather_into_tensor", "wait_tensor"):
            self.found.append(name[:4])
        return operation(*args, **(kwargs or {}))


def test_gathers_of_later_chunks_start_before_attention():
    """Gathers of both chunks start before the first is waited for."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        shard = ContextShard.of(dist.group.WORLD)
        tokens = shard.select(ids(ROWS, 16))
        with torch.no_grad(), CollectiveOrder() as order:
            model_of("rope")(tokens, positions_of("plain", 16), tokens, shard=shard)
    finally:
        dist.destroy_process_group()
    assert order.found == LAYERS * (4 * ["all_"] + 4 * ["wait"])


def test_gloo_gathers_by_exchange():
    """Its all-gather can corrupt memory while another collective is under way."""

    def work() -> set[str]:
        dist.init_process_group("gloo")
        shard = ContextShard.of(dist.group.WORLD)
        with CollectiveCounter() as counted:
            shard.gathered(shard.gather(torch.ones(2, 9)))
        dist.barrier()
        dist.destroy_process_group()
        return set(counted.counts)

    assert processes.together(2, work) == 2 * [{"all-to-all"}]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (12, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        (8, [[0, 6, 7], [1, 5], [2, 3, 4]]),
    ],
)
def test_ranks_own_an_early_and_a_late_chunk(length, expected):
    parts = [
        ContextShard(rank, 3, "").select(torch.arange(length)[None])[0].tolist()
        for rank in range(3)
    ]
    assert parts == expected


@pytest.mark.parametrize(("window", "sinks"), [(5, 0), (5, 2), (1, 0), (None, 0), (19, 3)])
def test_keys_of_a_chunk_are_those_that_any_of_its_queries_sees(window, sinks):
    """By enumeration. Plain positions whose keys are one range stay plain."""
    length = 32
    settings = settings_of({"name": "rope", "window": window, "sinks": sinks}).position
    for rank in range(2):
        shard = ContextShard(rank, 2, "").divided(length, 8)
        sharded = ShardedWindow(shard, TokenPositions.plain(length))
        for index, keys in zip(shard.chunks, sharded.keys(settings), strict=True):
            start, stop = shard.bounds(length, index)
            seen = {
                key
                for query in range(start, stop)
                for key in range(query + 1)
                if window is None or query - key < window or key < sinks
            }
            assert keys.position[0].tolist() == sorted(seen)
            assert keys.unit_steps == (len(seen) == max(seen) - min(seen) + 1)


def test_cache_and_partial_outputs_are_refused():
    model = model_of("rope")
    shard = ContextShard(0, 2, "")
    for more in ({"keep": 1}, {"cache": model.make_cache(1, 8)}):
        with torch.no_grad(), pytest.raises(ModelError, match="sharded"):
            model(ids(1, 4), TokenPositions.plain(8), shard=shard, **more)
