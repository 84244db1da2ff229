"""A fake GPU: tensors report the device cuda:0 and are computed on the CPU.

Operations that mix host and device tensors raise `MixedDevices`; every wait of the host for the
device and every blocking copy is counted with the module of this repository that caused it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.utils.backend_registration as backends
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")
aten = torch.ops.aten
# Operations whose result's value or size the host needs.
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}


class MixedDevices(AssertionError):
    """An operation that no GPU executes."""


class GpuTensor(torch.Tensor):
    """A CPU tensor labelled cuda:0; C++ sees PrivateUse1, which every build of torch supports."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device="privateuseone:0",
        )
        made.inner = inner
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def data_ptr(self):
        return self.inner.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return FakeGpu.active.run(func, args, kwargs or {})


class FakeGpu(TorchDispatchMode):
    """Inside it ``cuda`` exists. One per process: what it patches in torch stays patched.

    Attributes:
        waits: (module, what happened) → how often the host waited.
        copies: number of copies between host and device, with and without waiting.
    """

    active: FakeGpu

    def __init__(self):
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.copies = 0
        FakeGpu.active = self
        backends._setup_privateuseone_for_python_backend("fakegpu")
        torch._C._set_only_lift_cpu_tensors(True)
        torch.cuda._lazy_init = lambda: None
        torch.Tensor.pin_memory = lambda x, *args: x.clone()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        """Execute `func` on the CPU numbers and label its results."""
        tensors = [x for x in leaves((args, tuple(kwargs.values()))) if isinstance(x, torch.Tensor)]
        device = [x for x in tensors if isinstance(x, GpuTensor)]
        host = [x for x in tensors if not isinstance(x, GpuTensor)]
        asked = kwargs.get("device")
        to_device = bool(device) if asked is None else torch.device(asked).type != "cpu"
        self._inspect(func, args, kwargs, device, host, to_device)
        labels: dict[int, GpuTensor] = {}  # in-place operations return one of their arguments

        def strip(x):
            if isinstance(x, GpuTensor):
                labels[id(x.inner)] = x
                return x.inner
            return CPU if isinstance(x, torch.device) else x

        def label(x):
            if not isinstance(x, torch.Tensor) or isinstance(x, GpuTensor):
                return x
            return labels[id(x)] if id(x) in labels else GpuTensor(x)

        plain = {k: False if k == "pin_memory" else each(strip, v) for k, v in kwargs.items()}
        if asked is not None:
            plain["device"] = CPU
        out = func(*each(strip, args), **plain)
        return each(label, out) if to_device else out

    def _inspect(self, func, args, kwargs, device, host, to_device: bool) -> None:
        if func is aten._to_copy.default:
            self.copies += bool(device) != to_device
            if kwargs.get("non_blocking"):
                return
            if device and not to_device:
                self._wait("copy to the host")
            elif host and to_device:
                self._wait("copy to the device")
        elif func is aten.copy_.default and device and host:
            self.copies += 1
            if not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking"):
                self._wait(
                    "copy to the device" if isinstance(args[0], GpuTensor) else "copy to the host"
                )
        elif func in WAITS and device:
            self._wait(str(func))
        elif func in INDEXING and device:
            indices = [x for x in args[1] if isinstance(x, torch.Tensor)]
            if not isinstance(args[0], GpuTensor):
                raise MixedDevices(f"{func} indexes a host tensor by a device tensor in {place()}")
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self._wait("index by a mask")
            elif host:
                self._wait("index from the host")
        elif device and any(x.ndim for x in host):
            shapes = [tuple(x.shape) for x in host]
            raise MixedDevices(
                f"{func} mixes host tensors of shapes {shapes} with device tensors in {place()}"
            )

    def _wait(self, what: str) -> None:
        self.waits[place(), what] += 1


def place() -> str:
    """The innermost module of this repository on the stack, tests left out."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] not in ("tests", ".venv"):
            return file.relative_to(ROOT).as_posix()
        frame = frame.f_back
    return "autograd"


def each(f, x):
    return type(x)(each(f, y) for y in x) if isinstance(x, (list, tuple)) else f(x)


def leaves(x) -> Iterator:
    for y in x:
        if isinstance(y, (list, tuple)):
            yield from leaves(y)
        else:
            yield y


def to_gpu(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its parameters on the fake GPU; shared parameters stay shared."""
    moved: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and id(p) not in moved:
                moved[id(p)] = torch.nn.Parameter(
                    GpuTensor(p.data.clone()), requires_grad=p.requires_grad
                )
            part._parameters[name] = None if p is None else moved[id(p)]
    return module
