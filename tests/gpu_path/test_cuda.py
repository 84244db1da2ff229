"""Numbers of a GPU: kernels against the dense reference, bfloat16 against float32, decoding,
resume.

The tests marked gpu run on a GPU only. Each also runs one case on the CPU, so that the first GPU
does not find faults of the tests.
"""

import shutil
import sys
from functools import partial

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module

import generation.decoding
from generation.decoding import Generation
from generation.sampling import SamplingParams
from model import TokenPositions, Transformer
from model.decoding import make_decoder, pack
from model.decoding.packed import _stored_matrix, joined_layers
from run_directory.metrics_file import read_metrics
from tests.gpu_path.common import LAYOUTS, flex_tests, gpu_model, gradients
from tests.gpu_path.test_lowering import CASES as FLEX
from tests.model.zoo import build, ids, reach_of
from tests.training.conftest import (  # noqa: F401
    corpus,
    overrides,
    prepared_root,
    run,
    settings_of_runs,
)

LENGTH = 200  # more than one block of FlexAttention
SEEDS = [[0, 1], [0, 1], [2, 3]]  # of the rows
# Explicit weights, several views, transformed keys, a sum along the keys, and kernels of other
# kinds.
SCHEMES = [
    "rope",
    "alibi",
    "t5",
    "kerple",
    "fire",
    "fox",
    "cope",
    "shaw",
    "path",
    "stick_breaking",
    "pope",
]


def on_gpu(cases, quick, marks=()):
    """Parametrize by `case` and `device`: all cases on a GPU, one on the CPU, with `marks`."""
    absent = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"
    )
    params = [pytest.param(case, "cuda", marks=[pytest.mark.gpu, absent]) for case in cases]
    return pytest.mark.parametrize(
        ("case", "device"), [*params, pytest.param(quick, "cpu", marks=marks)]
    )


@pytest.fixture(autouse=True)
def _fresh_graphs():
    yield
    if torch.cuda.is_available():
        torch._dynamo.reset()


@on_gpu(
    [*FLEX, "cope:plain", "path:packed", "stick_breaking:ragged", "hyperbolic:plain"],
    "alibi:packed",
)
def test_kernels_match_dense_outputs_and_gradients(case, device, monkeypatch):
    name, layout = case.split(":")
    net = gpu_model(name).to(device).train()
    length = reach_of(net, LENGTH)
    tokens = ids(2, length).to(device)
    positions = LAYOUTS[layout](length).map(lambda x: x.to(device))
    dense, _ = gradients(net, tokens, positions, "dense", monkeypatch)
    found, _ = gradients(net, tokens, positions, "auto", monkeypatch)
    assert found.keys() == dense.keys()
    for key, expected in dense.items():
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found[key] / scale, expected / scale, rtol=0, atol=2e-3, msg=key)


@on_gpu(SCHEMES, "rope")
def test_bfloat16_gradients_agree_with_float32(case, device):
    net = gpu_model(case).initialize(0).to(device).train()
    length = reach_of(net, LENGTH)
    tokens = ids(4, length).to(device)
    positions = TokenPositions.plain(length, device=device)
    found = []
    for half in (False, True):
        net.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=half):
            nll = net(tokens, positions, targets=tokens.roll(-1, 1)).mean()
        nll.backward()
        grad = torch.cat(
            [p.grad.double().flatten() for p in net.parameters() if p.grad is not None]
        )
        found.append((float(nll.detach()), grad))
    (expected, grad), (nll, low) = found
    assert nll == pytest.approx(expected, rel=5e-3)
    assert float(torch.nn.functional.cosine_similarity(grad, low, dim=0)) > 0.99


@on_gpu([100, 129, 200, 255], 129, flex_tests)
def test_lengths_that_are_no_multiple_of_a_block_of_flex(case, device, monkeypatch):
    """With torch 2.7, gradients of FlexAttention with a block mask and a score function were NaN
    (pytorch#153799)."""
    if device == "cpu":
        monkeypatch.setattr(flex_module, "_validate_device", lambda q, k, v: None)
    net = gpu_model("alibi", layers=1).to(device).train()
    tokens = ids(2, case).to(device)
    positions = TokenPositions.plain(case, device=device)
    dense, _ = gradients(net, tokens, positions, "dense", monkeypatch)
    for half, atol in ((False, 2e-3), (True, 0.1)):
        with torch.autocast(device, torch.bfloat16, enabled=half):
            found, calls = gradients(net, tokens, positions, "flex", monkeypatch)
        assert calls == 1 and found.keys() == dense.keys()
        for key, expected in dense.items():
            scale = max(1.0, float(expected.abs().max()))
            close = torch.testing.assert_close
            close(found[key].float() / scale, expected / scale, rtol=0, atol=atol, msg=key)


@on_gpu(["rope", "fox"], "rope")
def test_fused_kernels_of_training(case, device):
    """Plain causality, and differences of sums as columns. On an H100 and H200, cuDNN's kernels are
    the fastest; torch chooses them since 2.11."""
    net = build(case, dtype=torch.float32, head_dim=64, layers=1).to(device).train()
    tokens = ids(4, 2048 if device == "cuda" else 64).to(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with torch.autocast(device, torch.bfloat16):
            nll = net(tokens, targets=tokens.roll(-1, 1)).mean()
        nll.backward()
    prefix = "aten::_scaled_dot_product_"
    found = {event.key for event in profile.key_averages() if event.key.startswith(prefix)}
    kernels = ["flash_attention_for_cpu"]
    if device == "cuda":
        is_hopper = torch.cuda.get_device_capability() == (9, 0)
        kernels = ["cudnn_attention"] if is_hopper else ["cudnn_attention", "flash_attention"]
    passes = [{f"{prefix}{kernel}", f"{prefix}{kernel}_backward"} for kernel in kernels]
    assert found in passes, found


PROMPTS = [[5, 6, 7, 8], [9, 4]]
GREEDY = SamplingParams(temperature=0)


def check_greedy(net: Transformer, prompts: list[list[int]], made: list[list[int | None]]) -> None:
    """Each token has the highest logit of a full pass, or one that differs by rounding only."""
    device = net.embed.weight.device
    for row, prompt in enumerate(prompts):
        for n, step in enumerate(made):
            before = torch.tensor([prompt + [int(step[row]) for step in made[:n]]], device=device)
            with torch.no_grad():
                logits = net(before, TokenPositions.plain(before.shape[1], device=device))[0, -1]
            assert float(logits.max() - logits[int(step[row])]) < 1e-3


@on_gpu([*SCHEMES, "carope", "wall", "rope-window"], "alibi")
def test_greedy_tokens_are_those_of_full_passes(case, device):
    """Decoding with the cache, one row shorter than the other."""
    net = pack(gpu_model(case).to(device).eval())
    check_greedy(net, PROMPTS, list(Generation(net, PROMPTS, 5, GREEDY)))


@pytest.fixture
def static_on_a_cpu(monkeypatch):
    """Decode with a static cache on every device; a CPU compiles with the graphs of Dynamo alone."""
    monkeypatch.setattr(generation.decoding, "make_decoder", partial(make_decoder, static=True))
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@on_gpu(["rope", "t5", "fox", "path", "cope", "rope-window"], "fox")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_later_generations_replay_a_kept_recording(
    case, device, is_compiled, static_on_a_cpu, fresh_dynamo
):
    """... with the weights of their time, also after generations of another shape."""
    net = gpu_model(case).to(device).eval()

    def made(prompts):
        return list(Generation(net, prompts, 9, GREEDY, is_compiled=is_compiled))

    first = made(PROMPTS)
    check_greedy(net, PROMPTS, first)
    kept = list(net.recordings)
    assert made(PROMPTS) == first
    alone = made(PROMPTS[:1])
    check_greedy(net, PROMPTS[:1], alone)
    assert made(PROMPTS) == first and made(PROMPTS[:1]) == alone
    assert len(net.recordings) == 2 and net.recordings[1] is kept[0]
    if device == "cuda":
        assert all(recording.graph is not None for recording in net.recordings)
        layers = [linears for block in net.layers for linears in joined_layers(block)]
        assert all(_stored_matrix(linears) is not None for linears in layers)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.parameters():  # as an optimizer
            weight += 0.2 * torch.randn(weight.shape, generator=generator).to(device)
    changed = made(PROMPTS)
    check_greedy(net, PROMPTS, changed)
    assert changed != first
    assert net.recordings[0] is kept[0]


@on_gpu(["rope", "fox"], "rope")
def test_sampled_tokens_depend_on_the_seeds_alone(case, device, static_on_a_cpu):
    """Random numbers are drawn before the recorded passes, which would repeat theirs."""
    net = gpu_model(case).to(device).eval()
    sampling = SamplingParams(temperature=1.5, top_p=0.95)
    made = [list(Generation(net, PROMPTS, 12, sampling, seeds=seeds)) for seeds in SEEDS]
    assert made[0] == made[1] and made[0] != made[2]
    rows = list(zip(*made[2], strict=True))
    assert len(set(rows[0])) > 3 and rows[0] != rows[1]
    assert list(zip(*made[0], strict=True))[1] != rows[1]


@on_gpu([True], False)
def test_recordings_outlive_others(case, device, static_on_a_cpu):
    """Their addresses are of memory that is theirs, cuBLAS's workspace as well."""
    sizes = {"dim": 1024, "head_dim": 64} if case else {}
    net, other = (
        build("rope", dtype=torch.float32, layers=2, **sizes).to(device).eval() for _ in range(2)
    )
    prompts = [PROMPTS[0]] * 5

    def made(model):
        return list(Generation(model, prompts, 12, GREEDY))

    first = made(net)
    made(other)
    other.recordings.clear()
    if case:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    blocks = [torch.full((1 << 20,), torch.nan, device=device) for _ in range(200 if case else 1)]
    assert made(net) == first
    assert all(block.isnan().all() for block in blocks)


@on_gpu([True], False, pytest.mark.slow)
def test_resumed_training_has_the_losses_of_an_uninterrupted_run(case, device, overrides, tmp_path):  # noqa: F811
    folder = tmp_path / "run"
    words = [*overrides, f"training.compile={str(case).lower()}", "training.log_interval=1"]
    words += ["training.checkpoint.keep=9", "--run-dir", str(folder)]
    losses = []
    saved = []
    for _ in range(2):
        done = run(*words, cwd=tmp_path, prefix=[sys.executable])
        assert done.returncode == 0, done.stderr
        losses.append(
            {x["step"]: x["loss"] for x in read_metrics(folder / "metrics.jsonl", "train")}
        )
        checkpoints = sorted((folder / "checkpoints").glob("step-*"))
        saved.append([checkpoint.name for checkpoint in checkpoints])
        for checkpoint in checkpoints[2:]:
            shutil.rmtree(checkpoint)
    # the second run has trained the last six steps again
    assert saved[0] == saved[1] and len(saved[0]) == 4
    assert losses[0].keys() == losses[1].keys() and len(losses[0]) == 12
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
