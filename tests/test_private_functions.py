"""Private names of other packages that the product uses: one list, with the reason of each.

A private name can disappear in any release. Where a public one does the same in every supported
version, use that one.
"""

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from run_directory.weights import clean_name
from tests.files import ROOT
from tests.test_house import PACKAGES, parsed, shown, sources

COLLECTIVES = (
    "return tensors, which torch.compile, fake tensors and autograd functions handle; the public "
    "collectives write into their arguments"
)
LOG_SUM_EXP = "returns the log-sum-exp of the logits; the public function does not"
STORED = "selective checkpointing names operations, one for each kernel of the public function"
FOREACH = "updates all weights in one kernel; in PyTorch's documentation as beta"
SHARDING = "model/sharding.py"
KERNEL = "torch.ops.aten._scaled_dot_product"
FUNCTIONAL = "torch.distributed._functional_collectives"
CUBLAS = "torch._C._cuda_clearCublasWorkspaces"
# (file, name, reason)
LISTED = [
    ("model/attention/flex.py", "torch._dynamo.config.recompile_limit",
     "torch.compile has an option for it since torch 2.13 only"),
    ("model/attention/kernels.py", f"{KERNEL}_flash_attention_for_cpu", LOG_SUM_EXP),
    (SHARDING, f"{FUNCTIONAL}.all_reduce", COLLECTIVES),
    (SHARDING, f"{FUNCTIONAL}.all_to_all_single", COLLECTIVES),
    (SHARDING, f"{FUNCTIONAL}.wait_tensor", COLLECTIVES),
    (SHARDING, "torch.ops._c10d_functional.all_gather_into_tensor", COLLECTIVES),
    (SHARDING, "torch.ops._c10d_functional.reduce_scatter_tensor", COLLECTIVES),
    ("model/block.py", f"{KERNEL}_cudnn_attention.default", STORED),
    ("model/block.py", f"{KERNEL}_efficient_attention.default", STORED),
    ("model/block.py", f"{KERNEL}_flash_attention.default", STORED),
    ("model/block.py", f"{KERNEL}_flash_attention_for_cpu.default", STORED),
    ("model/attention/biased.py", f"{KERNEL}_flash_attention_for_cpu", LOG_SUM_EXP),
    ("model/decoding/static.py", "torch._dynamo.config.recompile_limit",
     "torch.compile has an option for it since torch 2.13 only"),
    ("model/decoding/static.py", "torch._dynamo.config.specialize_float",
     "torch.compile has no option that makes settings constants of the graph"),
    ("model/decoding/static.py", CUBLAS,
     "a CUDA graph keeps the address of cuBLAS's workspace"),
    ("model/mixers/recurrence.py", "torch._disable_dynamo",
     "torch.compiler.disable imports Dynamo, half of what torch itself takes to import"),
    ("model/transformer.py", "torch._dynamo.config.specialize_float",
     "torch.compile has no option that makes settings constants of the graph"),
    ("training/parallel.py", "torch.distributed.distributed_c10d._get_default_store",
     "a process that fails tells the others through the store that connects them"),
    ("training/loss_scale.py", "torch._foreach_mul_", FOREACH),
    ("training/train_state.py", "torch._foreach_add_", FOREACH),
    ("training/train_state.py", "torch._foreach_copy_", FOREACH),
    ("training/train_state.py", "torch._foreach_mul_", FOREACH),
    ("training/train_state.py", "torch._foreach_sub", FOREACH),
]  # fmt: skip
# Documented as public.
PUBLIC = {"os._exit", "._asdict", "._fields", "._make", "._replace"}
OWN_PACKAGES = {*PACKAGES, *(file.stem for file in ROOT.glob("*.py"))}


def is_private(name: str) -> bool:
    parts = name.split(".")
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def product() -> list[Path]:
    return [file for file in sources() if file.relative_to(ROOT).parts[0] != "tests"]


@cache
def own_names() -> set[str]:
    """What the product defines: functions, classes, variables and attributes of `self`."""
    names = set()
    for file in product():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return names


def dotted(node: ast.expr, imported: dict[str, str]) -> str | None:
    """The full name of `a.b.c`, if `a` is from another package."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, imported)
        return base and f"{base}.{node.attr}"
    return None


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Full names of what is from other packages, by local name: imports, and variables such as
    `aten = torch.ops.aten`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    names = {key: name for key, name in names.items() if name.split(".")[0] not in OWN_PACKAGES}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = dotted(node.value, names) or ""
    return {key: name for key, name in names.items() if name}


def private_names(tree: ast.Module) -> set[str]:
    """Private names of other packages that a module uses. `._name` is an attribute of an object
    that no file of the product defines."""
    imported = imported_names(tree)
    found = {name for name in imported.values() if not name.startswith("torch.ops.")}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    inner |= {id(node.value) for node in tree.body if isinstance(node, ast.Assign)}
    for node in ast.walk(tree):
        attribute = ""
        if isinstance(node, ast.Attribute):
            name = dotted(node, imported)
            if name is None:
                attribute = node.attr
            elif id(node) not in inner:
                found.add(name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            attribute = str(getattr(node.args[1], "value", ""))
        if attribute not in own_names():
            found.add(f".{attribute}")
    return {name for name in found if is_private(name)} - PUBLIC


def resolve(name: str) -> Any:
    """The object of a dotted name.

    Raises:
        AttributeError: it does not exist.
    """
    first, *parts = name.split(".")
    found = importlib.import_module(first)
    path = first
    for part in parts:
        path += f".{part}"
        if not hasattr(found, part) and isinstance(found, type(torch)):
            try:
                importlib.import_module(path)
            except ModuleNotFoundError:
                raise AttributeError(path) from None
        found = getattr(found, part)
    return found


def test_private_names_are_those_listed():
    used = {(shown(file), name) for file in product() for name in private_names(parsed(file))}
    listed = {(file, name) for file, name, _ in LISTED}
    assert sorted(used - listed) == [], "use a public function, or list it with the reason"
    assert sorted(listed - used) == [], "no longer used: remove it from the list"
    assert len(listed) == len(LISTED)


@pytest.mark.parametrize(("file", "name"), [entry[:2] for entry in LISTED])
def test_private_names_exist(file, name):
    if name == CUBLAS and not torch.backends.cuda.is_built():
        return  # builds for CPUs lack it; `torch._inductor.cudagraph_trees` calls it
    try:
        resolve(name)
    except AttributeError as error:
        pytest.fail(f"torch {torch.__version__} has no {name}, which {file} uses: {error}")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch\ntorch._foreach_neg(x)", "torch._foreach_neg"),
        ("import torch.distributed as dist\ndist.nn._f()", "torch.distributed.nn._f"),
        ("from torch._inductor import config", "torch._inductor.config"),
        ("def f():\n    from accelerate.utils import _a", "accelerate.utils._a"),
        ("import torch\naten = torch.ops.aten\naten._softmax(x)", "torch.ops.aten._softmax"),
        ("def f(tensor):\n    return tensor._typed_storage()", "._typed_storage"),
        ("def f(parser):\n    return getattr(parser, '_actions')", "._actions"),
    ],
)  # fmt: skip
def test_private_names_are_found(code, name):
    assert private_names(ast.parse(code)) == {name}


def test_public_names_are_not_private():
    code = "import os, torch\nfrom model import _own\nos._exit(1)\ntorch.ops.aten.mm(x.__dict__)"
    assert private_names(ast.parse(code)) == set()


def test_compiled_modules_have_the_prefix_that_names_are_stored_without():
    """`_orig_mod` is private too, but part of the names of parameters."""
    compiled = torch.compile(torch.nn.Linear(2, 3, bias=False))
    [(name, _)] = compiled.named_parameters()
    assert name == "_orig_mod.weight"
    assert clean_name(name) == "weight"
