"""FlexAttention of a scheme lowered for an H100 on a machine without a GPU: Triton source and sm_90
code.

    python -m tests.gpu_path.lowering GUARD.so [--machine-code] CASE:LAYOUT ... [loss]

prints one JSON line per case: its kernels with their number of atomic additions and, with
`--machine-code`, the shared memory that they need in bytes and the number of their operations on
int64 numbers of all pairs of a tile. A case that never calls FlexAttention
has no kernels. The case `loss` prints the dtypes of the buffers of logits in the training loss.
GUARD.so is built from `cuda_guard.cpp`. Runs in a separate process, because what it patches in
torch stays patched.
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
libraries = Path(importlib.util.find_spec("torch").submodule_search_locations[0]) / "lib"
for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[1])

import torch
import torch._dynamo.device_interface as device_interface
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.fuse_attention as fuse_attention
import torch._inductor.fx_passes.misc_patterns as misc_patterns
import torch._inductor.fx_passes.pad_mm as pad_mm
import torch._inductor.runtime.triton_helpers as triton_helpers
import torch._inductor.runtime.triton_heuristics as triton_heuristics
import torch.cuda.random
import torch.nn.attention.flex_attention as flex
import triton
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
TARGET = GPUTarget("cuda", 90, 32)
LENGTH = 256
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.S)


class NotRun(RuntimeError):
    """Raised where a lowered graph would run."""


class Driver:
    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda:0")


def patched(target, **attributes) -> None:
    """Replace attributes that exist; another torch fails here."""
    for name, value in attributes.items():
        getattr(target, name)
        setattr(target, name, value)


def pretend_h100() -> None:
    patched(
        torch.cuda,
        get_device_properties=lambda device=None: H100,
        get_device_capability=lambda device=None: (9, 0),
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        _lazy_init=lambda: None,
        synchronize=lambda device=None: None,
        set_device=lambda device: None,
        _exchange_device=lambda device: 0,
        _maybe_exchange_device=lambda device: 0,
        get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda *args, **keys: None,
    )
    patched(
        torch.cuda.random,
        _lazy_init=lambda: None,
        get_rng_state=torch.cuda.get_rng_state,
        set_rng_state=torch.cuda.set_rng_state,
    )
    # does not exist in a build for CPUs
    torch.cuda._get_device_properties = lambda device=None: H100
    torch.version.cuda = "13.0"
    patched(
        device_interface.CudaInterface,
        is_available=staticmethod(lambda: True),
        get_compute_capability=staticmethod(lambda device=None: 90),
        is_triton_capable=staticmethod(lambda device=None: True),
        raise_if_triton_unavailable=staticmethod(lambda device=None: None),
    )
    patched(
        device_interface.CudaInterface.Worker,
        get_device_properties=staticmethod(lambda device=None: H100),
        current_device=staticmethod(lambda: 0),
    )
    driver.set_active(Driver())
    # These passes trace patterns with CUDA tensors.
    patched(fuse_attention, _sfdp_init=lambda *args, **keys: None)
    patched(pad_mm, _pad_mm_init=lambda *args, **keys: None)
    patched(misc_patterns, _misc_patterns_init=lambda *args, **keys: None)
    inductor_config.joint_graph_constant_folding = False
    inductor_config.fx_graph_cache = False
    functorch_config.force_non_lazy_backward_lowering = True
    functorch_config.enable_autograd_cache = False
    patched(FakeTensorMode, avoid_device_init=property(lambda mode: True))
    patched(triton_helpers, set_driver_to_gpu=lambda *args: None)


SOURCES: list[str] = []


def keep_source(graph: GraphLowering):
    code, _ = graph.codegen()
    SOURCES.append(code.value)

    def call(args):
        raise NotRun

    return SimpleNamespace(call=call, __file__="none", runner=None)


pretend_h100()
patched(GraphLowering, compile_to_module=keep_source, _compile_to_module=keep_source)


import model.attention.flex as flex_kernel
import model.attention.kernels as kernels
import model.mixers.softmax
import model.position.table
from model import TokenPositions, Transformer
from model.loss import OutputHead, summed_nll
from tests.model.zoo import build, packed

host_tensor = torch.tensor


def tensor(data, dtype=None, device=None):
    """torch.tensor, which a machine without a GPU cannot copy."""
    if device is None or torch.device(device).type != "cuda":
        return host_tensor(data, dtype=dtype, device=device)
    with _disable_current_modes():
        made = host_tensor(data, dtype=dtype)
    return torch.empty(made.shape, dtype=made.dtype, device="cuda")


def block_mask(mask_mod, rows, _, queries, keys, device):
    """An empty block mask: its numbers do not matter for lowering."""
    q = -(-queries // 128)
    k = -(-keys // 128)
    rows = rows or 1

    def empty(*shape):
        return torch.zeros(rows, 1, *shape, dtype=torch.int32, device=device)

    by_query = (empty(q), empty(q, k))
    by_key = (empty(k), empty(k, q))
    counts = (*by_query, *by_query, *by_key, *by_key)
    return flex.BlockMask((queries, keys), *counts, (128, 128), mask_mod)


def moved(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cuda")


def to_gpu(net: Transformer) -> None:
    """Replace the parameters by those of a fake GPU; inside FakeTensorMode."""
    for part in net.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = torch.nn.Parameter(
                    moved(p), requires_grad=torch.is_grad_enabled()
                )


def lower(case: str, layout: str) -> list[str]:
    """Inductor's sources for forward and backward of the first view of the first layer, in
    bfloat16."""
    SOURCES.clear()
    torch._dynamo.reset()
    flex_kernel._compiled.cache_clear()
    model.position.table.on_device.cache_clear()
    net = build(
        case, dtype=torch.float32, heads=4, kv_heads=2, head_dim=64, dim=64, layers=2, train=LENGTH
    ).train()
    positions = {
        "plain": lambda: TokenPositions.plain(LENGTH),
        "packed": lambda: packed([[100, LENGTH - 100], [LENGTH - 30, 30]]),
        "ragged": lambda: TokenPositions.left_padded([LENGTH, LENGTH - 9], LENGTH),
    }[layout]()

    def attend(views, v, scale, normalizer):
        v = v.to(torch.bfloat16)
        if kernels.choose(views, v, normalizer, "cuda") != "flex":
            return torch.zeros_like(views[0].q[..., : v.shape[-1]])
        needs_lse = len(views) > 1 or normalizer.sink is not None
        aux = flex_kernel.AuxRequest(lse=True) if needs_lse else None
        flex_kernel.flex_view(views[0], v, scale, aux)
        raise NotRun

    def fused(function, device, dynamic=None, with_lse=False):
        if function is flex_kernel.create_block_mask:
            return block_mask
        return torch.compile(function, dynamic=dynamic, fullgraph=True)

    flex_kernel.fused = fused
    model.mixers.softmax.attend = attend
    torch._C._set_only_lift_cpu_tensors(True)
    torch.tensor = tensor
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        to_gpu(net)
        positions = positions.map(moved)
        try:
            net(torch.zeros(2, LENGTH, dtype=torch.long, device="cuda"), positions)
        except NotRun:
            pass
        except RuntimeError as error:  # from autograd or Dynamo, which wrap it
            if "NotRun" not in f"{error!r} {error.__cause__!r}" and not SOURCES:
                raise
    torch.tensor = host_tensor
    return list(SOURCES)


def logit_dtypes() -> list[str]:
    """The dtypes of the buffers (rows, V) of the compiled training loss, under autocast."""
    SOURCES.clear()
    rows = 96
    vocab = 1000
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        x = torch.empty(2, rows // 2, 64, device="cuda", requires_grad=True)
        weight = torch.empty(vocab, 64, device="cuda", requires_grad=True)
        targets = torch.empty(2, rows // 2, dtype=torch.int64, device="cuda")
        run = torch.compile(lambda *args: summed_nll(OutputHead(args[1]), args[0], args[2], None))
        with torch.autocast("cuda", torch.bfloat16), contextlib.suppress(NotRun):
            run(x, weight, targets)
    made = rf"empty_strided_cuda\(\({rows}, {vocab}\), \({vocab}, 1\), torch\.(\w+)\)"
    return [dtype for source in SOURCES for dtype in re.findall(made, source)]


def machine_code(name: str, source: str) -> dict[str, int]:
    """A FlexAttention kernel compiled to sm_90 code: bytes of shared memory, and operations on
    int64 numbers of all pairs of a tile."""
    found: dict = {}

    def keep(*args, **keys):
        def inner(function):
            found.update(function=function, **keys)
            return function

        return inner

    patched(triton_heuristics, template=keep)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.py")
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = found["function"]
        meta = found["triton_meta"]

        def argument(key):
            if isinstance(key, str):
                return key
            return function.arg_names[key if isinstance(key, int) else key[0]]

        constants = {argument(key): value for key, value in meta["constants"].items()}
        signature = {**meta["signature"], **dict.fromkeys(constants, "constexpr")}
        places = {(function.arg_names.index(key),): value for key, value in constants.items()}
        attributes: dict = {}
        for config in meta["configs"]:
            attributes |= config if isinstance(config, dict) else {}
        with _disable_current_modes():
            compiled = triton.compile(
                ASTSource(
                    function,
                    {name: signature[name] for name in function.arg_names if name in signature},
                    constexprs=places,
                    attrs=attributes,
                ),
                target=TARGET,
                options={"num_warps": found["num_warps"], "num_stages": found["num_stages"]},
            )
    of_pairs = r"= arith\.\w+ [^\n]*tensor<(?!1x)\d+x(?!1x)\d+xi64>"
    return {
        "shared": compiled.metadata.shared,
        "int64": len(re.findall(of_pairs, compiled.asm["ttir"])),
    }


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    is_compiled = "--machine-code" in words
    for word in words:
        if word.startswith("-"):
            continue
        if word == "loss":
            print(json.dumps({"case": word, "logits": logit_dtypes()}), flush=True)
            continue
        case, layout = word.split(":")
        made = []
        for code in lower(case, layout):
            for name, source in KERNEL.findall(code):
                if "tem_fused" in name:
                    kind = "backward" if "backward" in name else "forward"
                    kernel = {"kind": kind, "atomics": source.count("atomic_add")}
                    made.append(kernel | (machine_code(name, source) if is_compiled else {}))
        print(json.dumps({"case": word, "kernels": made}), flush=True)


if __name__ == "__main__":
    main(sys.argv[2:])
