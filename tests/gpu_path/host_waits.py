"""Host waits of a training step, an evaluated batch and a decoded token, on the fake GPU.

The fake GPU's patches of torch are permanent: measure in a process that ends.
"""

import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import model.attention.flex as flex
import model.decoding as decoding
import model.decoding.packed as packed_blocks
import model.decoding.static as static
from evaluation.scoring.text_loss import ModelScorer
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import TokenPositions, Transformer
from run_directory.run_settings import RunSettings
from run_directory.training_schedule import TrainingSchedule
from run_directory.training_settings import (
    AdamWSettings,
    SkipNonFinite,
    SpikeSettings,
    TrainingSettings,
)
from tests.gpu_path.common import gpu_model
from tests.gpu_path.fake_gpu import CUDA, FakeGpu, to_gpu
from tests.model.zoo import ids, packed, reach_of
from train import train_step
from training.micro_batches import MicroBatch, StepBatch
from training.optimizer import Optimizer
from training.step_guard import StepGuard
from training.stop_requests import StopRequests
from training.train_state import TrainState

ROWS = 4


def repeated(q, *others):
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in others]


def flex_attention(
    q, k, v, score_mod=None, block_mask=None, scale=None, enable_gqa=False, **options
):
    """FlexAttention as plain tensor operations on the device of `q`."""
    k, v = repeated(q, k, v)
    device, (batch, heads, queries, _), keys = q.device, q.shape, k.shape[2]
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[None, :, None, None]
    i = torch.arange(queries, device=device)[None, None, :, None]
    j = torch.arange(keys, device=device)[None, None, None, :]
    scores = q @ k.mT * scale
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    scores = scores.masked_fill(~block_mask.mask_mod(b, h * 0, i, j), -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.where(lse[..., None].isfinite(), scores - lse[..., None], -torch.inf).exp() @ v
    return out if options.get("return_aux") is None else (out, SimpleNamespace(lse=lse))


def create_block_mask(mask_mod, batch, heads, queries, keys, device):
    b = torch.arange(batch or 1, device=device)[:, None, None, None]
    i = torch.arange(queries, device=device)[None, None, :, None]
    mask_mod(b, b * 0, i, torch.arange(keys, device=device)[None, None, None, :])
    return SimpleNamespace(mask_mod=mask_mod)


def scaled_dot_product_attention(
    q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False
):
    k, v = repeated(q, k, v)
    scores = q @ k.mT * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores if attn_mask is None else scores + attn_mask.to(scores.dtype)).softmax(-1) @ v


class CudaGraph:
    """Calls the function. What a CUDA graph does not record is an error."""

    def __init__(self, function, x):
        for _ in range(3):
            function(x)
        self.function = function

    def __call__(self, x):
        gpu = FakeGpu.active
        before = gpu.copies, gpu.waits.copy()
        out = self.function(x)
        assert (gpu.copies, gpu.waits) == before, "a CUDA graph with copies or waits"
        return out


class OneDevice:
    """`training.parallel.Parallel` of one process on the fake GPU."""

    device = CUDA
    world = 1
    shard = None

    def sum(self, x):
        return x

    def no_sync(self, model, enabled):
        return nullcontext()

    def autocast(self):
        return nullcontext()


def batch_of(layout: str, length: int, seed: int) -> MicroBatch:
    """A loader's batch: `skipped` leaves positions out, `real` gives fractional ones."""
    tokens = ids(ROWS, length + 1, seed)
    p = TokenPositions.plain(length)
    generator = torch.Generator().manual_seed(seed)
    if layout == "packed":
        p = packed([[4, length - 4], [length - 3, 3], [length], [5, length - 5]])
    elif layout == "skipped":
        drawn = [torch.randperm(length + 7, generator=generator)[:length] for _ in range(ROWS)]
        position = torch.stack(drawn).sort(1).values
        p = replace(p, position=position, position_end=length + 7, unit_steps=False)
    elif layout == "real":
        position = p.position.double() + torch.rand(ROWS, length, generator=generator).double()
        p = replace(p, position=position, position_end=length + 1, unit_steps=False)
    return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), p)


def train(case: str, gpu: FakeGpu, layout: str) -> Counter | None:
    """Waits of the third step: the first ones make tables and optimizer states."""
    net = gpu_model(case)
    length = reach_of(net)
    if layout == "skipped" and net.limit is not None:
        return None
    if layout == "real" and not all(scheme.supports_fractions for scheme in net.position.values()):
        return None
    to_gpu(net).train()
    parallel = OneDevice()
    t = TrainingSettings()
    stage = TrainingSchedule(RunSettings(training=t)).stage(0)
    state = TrainState(
        model=net,
        optimizer=Optimizer(net, AdamWSettings()),
        guard=StepGuard(SkipNonFinite(name="skip"), SpikeSettings(window=8), CUDA),
        ema=None,
        forward=net,
    )
    for n in range(3):
        gpu.waits.clear()
        part = batch_of(layout, length, n).to(parallel)
        batch = StepBatch(stage, [part], n_targets=ROWS * length)
        result = train_step(state, batch, parallel, t, StopRequests())
    waits = gpu.waits.copy()
    result.read()
    return waits


def evaluate(case: str, gpu: FakeGpu, chunk: int) -> Counter:
    """Waits of the second batch."""
    net = to_gpu(gpu_model(case))
    score = ModelScorer(net, device=CUDA, chunk=chunk)
    for _ in range(2):
        gpu.waits.clear()
        score(ids(2, reach_of(net) + 1).numpy(), 6)
    return gpu.waits.copy()


def decode(case: str, gpu: FakeGpu, prompts: list[list[int]], sampling: SamplingParams) -> Counter:
    """Waits of one token, the fifth. Tokens are those of a CPU, also where rows end early."""
    waits = Counter()

    def made(net: Transformer, eos: int) -> list[list[int | None]]:
        steps = []
        tokens = Generation(net, prompts, 6, sampling, eos_ids=[eos])
        with torch.no_grad():  # inference mode does not take tensor subclasses
            for step in Generation._steps.__wrapped__(tokens):
                steps.append(step)
                if len(steps) == 5:
                    waits.update(gpu.waits)
                gpu.waits.clear()
        return steps

    net = gpu_model(case)
    whole = made(net, -1)
    shorter = made(net, whole[2][0])
    waits.clear()
    to_gpu(net)
    assert (made(net, -1), made(net, whole[2][0])) == (whole, shorter), case
    return waits


GREEDY = SamplingParams(temperature=0)
NUCLEUS = SamplingParams(top_p=0.9, top_k=20, repetition_penalty=1.1)
PROMPTS = [[1, 2, 3], [4, 5, 6]]
ACTIVITIES = {
    "train plain": partial(train, layout="plain"),
    "train packed": partial(train, layout="packed"),
    "train skipped": partial(train, layout="skipped"),
    "train real": partial(train, layout="real"),
    "evaluate whole": partial(evaluate, chunk=4096),
    "evaluate chunks": partial(evaluate, chunk=5),
    "decode": partial(decode, prompts=PROMPTS, sampling=GREEDY),
    "decode ragged": partial(decode, prompts=[[1, 2, 3], [4]], sampling=GREEDY),
    "decode nucleus": partial(decode, prompts=PROMPTS, sampling=NUCLEUS),
}


def measure(case: str) -> dict[str, dict[str, int]]:
    found = {}
    for activity, run in ACTIVITIES.items():
        with FakeGpu.active as gpu:
            waits = run(case, gpu)
        if waits is not None:
            modules = Counter(module for module, _ in waits.elements())
            found[activity] = dict(sorted(modules.items()))
    return found


def measured(cases: list[str]) -> dict[str, dict[str, dict[str, int]]]:
    """{case: {activity: {module: waits}}}. Patches torch for the rest of this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    FakeGpu()
    flex.flex_attention = flex_attention
    flex.create_block_mask = create_block_mask
    flex.fused = lambda function, *options, **more: function
    # Copies: storage of the fake GPU's tensors cannot be shared.
    packed_blocks.joined_weight = lambda linears: torch.cat(
        [x.weight.detach() for x in linears]
    ).t()
    decoding.pack = lambda model: model
    static.CudaGraph = CudaGraph
    F.scaled_dot_product_attention = scaled_dot_product_attention
    torch.cuda.Event = lambda: SimpleNamespace(record=lambda *_: None, synchronize=lambda: None)
    torch.cuda.current_stream = lambda device: None
    return {case: measure(case) for case in cases}
