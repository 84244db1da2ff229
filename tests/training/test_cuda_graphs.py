"""`training.cuda_graphs`: equal to training without them where every pass overwrites the results
of the pass before, as recorded graphs do."""

from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from errors import TrainingError, UserError
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from tests.training.curves import Training
from tests.training.test_processes import PLAIN, SMALL, farthest, prepared
from tests.training.tiny import lines, trained
from training.feasibility import check_processes

__all__ = ["prepared"]  # a fixture
GRAPHS = ["training.compile=true", "training.cuda_graphs=true"]
WORDS = [*SMALL, PLAIN, "training.precision=float64", "training.micro_batch_size=2"]


class Replayed:
    """Runs a graph eagerly; its outputs are in memory that the next call overwrites."""

    def __init__(self, graph, inputs):
        self.graph = graph
        self.memory = []
        self.calls = 0

    def __call__(self, *args):
        outputs = self.graph(*args)
        if not self.memory:
            self.memory = [x.clone() if isinstance(x, torch.Tensor) else x for x in outputs]
        for kept, x in zip(self.memory, outputs, strict=True):
            if isinstance(x, torch.Tensor):
                kept.copy_(x)
        self.calls += 1
        return [kept.detach() if isinstance(kept, torch.Tensor) else kept for kept in self.memory]


@pytest.fixture
def replays(monkeypatch, fresh_dynamo):
    """The recorded graphs; what torch.compile and mark_step_begin got is kept on the list."""
    found = SimpleNamespace(graphs=[], options=[], marks=0)

    def compiler(graph, inputs):
        found.graphs.append(Replayed(graph, inputs))
        return make_boxed_func(found.graphs[-1])

    compile = torch.compile

    def compiled(function, *, dynamic, options):
        found.options.append(options)
        backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
        return compile(function, backend=backend, dynamic=dynamic, fullgraph=True)

    def mark():
        found.marks += 1

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", mark)
    return found


def test_gradients_accumulate_outside_of_recorded_memory(prepared, replays):
    expected = Training(WORDS, prepared).steps(0, 4)
    training = Training([*WORDS, *GRAPHS], prepared)
    assert farthest(training.steps(0, 4), expected) < 1e-10
    assert replays.options == [{"triton.cudagraphs": True}]
    assert replays.marks == 16
    assert [graph.calls for graph in replays.graphs] == [16, 16]  # forward and backward


@pytest.mark.parametrize(
    "overrides",
    [
        "training.compile=false",
        "training.micro_batch_size=3",
        "training.parallel.context=2",
        "training.parallel.sharding=full",
        "training.parallel.activation_checkpointing=selective",
        "data.packing=intra_document",
        "data.positions.name=random_offset",
        "training.stages=[{length: 12, duration: 0.5}, {length: 24}]",
    ],
)
def test_passes_that_differ_between_steps_are_refused(overrides):
    with pytest.raises(UserError, match=r"training\.cuda_graphs"):
        load_settings(RunSettings, [*SMALL, PLAIN, "training.cuda_graphs=true", overrides])


@pytest.mark.parametrize(("world", "kind"), [(2, "cuda"), (1, "cpu"), (1, "cuda")])
def test_one_gpu_is_required(world, kind):
    settings = load_settings(RunSettings, [*SMALL, PLAIN, "training.cuda_graphs=true"])
    parallel = SimpleNamespace(world=world, device_type=kind, data_world=world, sharded=False)
    if (world, kind) == (1, "cuda"):
        check_processes(settings, parallel)
    else:
        with pytest.raises(TrainingError, match=r"training\.cuda_graphs"):
            check_processes(settings, parallel)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_run_on_a_gpu(overrides, tmp_path):
    words = [*overrides, "training.compile=true", "training.micro_batch_size=2"]
    for flag in ("false", "true"):
        run = ["--run-dir", tmp_path / flag]
        assert trained(*words, f"training.cuda_graphs={flag}", *run) == 0
    losses = [[x["loss"] for x in lines(tmp_path / flag, "train")] for flag in ("false", "true")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
