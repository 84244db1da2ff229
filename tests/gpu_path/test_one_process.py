"""DDP, FSDP2 and shared windows in a process group of one process, by NCCL on a GPU: three steps
equal those without a group. What needs two GPUs is not shown by this."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data.data_settings import DataSettings
from data.preparation.preparation import prepare
from model import ContextShard
from run_directory.console import Console
from run_directory.weights import is_sharded
from tests.gpu_path.test_cuda import on_gpu
from tests.processes import free_port
from tests.training.conftest import corpus, prepared_root  # noqa: F401
from tests.training.curves import Training, afresh

SIZES = [
    "train_length=24",
    "model={dim: 32, layers: 2, heads: 4, kv_heads: 2, head_dim: 16}",
    "data.packing=intra_document",
    "training={batch_size: 8, micro_batch_size: 4, tokens: 20k, validation: {targets: 8}}",
]
# settings, and the largest difference of a loss or gradient norm
PRECISIONS = {
    "float64": (["training.precision=float64"], 1e-10),
    "bfloat16 compiled": (["training.precision=bfloat16", "training.compile=true"], 2e-2),
}
PATHS = ["ddp", "fsdp", "context"]


@on_gpu(
    [f"{path} {precision}" for path in PATHS for precision in PRECISIONS],
    "all float64",
)
def test_a_group_of_one_trains_as_a_process_without_a_group(
    case,
    device,
    corpus,  # noqa: F811
    prepared_root,  # noqa: F811
    monkeypatch,
):
    """On the CPU, by gloo, all in one test."""
    paths, precision = case.split(maxsplit=1)
    settings, tolerance = PRECISIONS[precision]
    source = {"name": "files", "path": str(corpus)}
    text = {"source": source, "tokenizer": {"name": "bytes"}, "valid_fraction": 0.2}
    text |= {"packing": "intra_document", "root": str(prepared_root)}
    prepared = prepare(DataSettings.model_validate(text), Console(quiet=True))
    if device == "cpu":
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def train(path: str) -> list[tuple[float, float]]:
        full = ["training.parallel.sharding=full"] if path == "fsdp" else []
        training = Training(
            [*SIZES, *settings, *full], prepared, prepare=lambda model: model.to(device)
        )
        if path == "context":
            training.parallel.shard = ContextShard.of(dist.group.WORLD)
        assert isinstance(training.state.forward, DistributedDataParallel) == (
            path in ("ddp", "context")
        )
        assert all(is_sharded(p) == (path == "fsdp") for p in training.model.parameters())
        assert training.parallel.device.type == device
        if path != "alone":
            assert dist.get_backend() == ("gloo" if device == "cpu" else "nccl")
        return training.steps(0, 3)

    expected = afresh(lambda: train("alone"))
    assert expected[-1][0] < expected[0][0]
    launch = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for path in PATHS if paths == "all" else [paths]:
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        found = afresh(lambda path=path: train(path))
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
