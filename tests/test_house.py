"""Code rules that a syntax tree can show: allowed imports between packages, and forbidden constructs.

Import order within `model`: attention.kernels ← position.base ← schemes ← registry ← settings ← cache ←
attention.softmax ← attention.linear ← block ← packed ← transformer;
the other packages are above it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"model", "data", "training", "evaluation", "interop", "studies", "generation", "scripts", "tests"}
# What each package may import of the others. Top-level scripts and tests may import any of them, and all may
# import errors.py.
MAY_IMPORT = {
    "model": set(),
    "data": set(),
    "generation": {"model", "data"},
    "training": {"model", "data", "generation"},
    "evaluation": {"model", "data", "generation"},
    "interop": {"model", "data", "training", "evaluation", "generation"},
    "studies": {"model", "data", "training", "evaluation"},
}
# Lower may be imported by higher; equal ranks by each other. A file of model/position not named is a scheme.
RANKS = {
    "model.loss": 1,
    "model.attention": 0,
    "model.attention.mask": 1,
    "model.attention.kernels": 2,
    "model.position.token_positions": 1,
    "model.position.table": 2,
    "model.position.temperature": 3,
    "model.position.base": 4,
    "model.position.registry": 6,
    "model.position": 7,
    "model.settings": 8,
    "model.cache": 9,
    "model.attention.softmax": 10,
    "model.attention.linear": 11,
    "model.block": 12,
    "model.packed": 13,
    "model.transformer": 14,
    "model": 15,
}
SCHEME = 5


def sources() -> list[Path]:
    """Every Python file of the product and its tests."""
    folders = [ROOT / name for name in sorted(PACKAGES)]
    return sorted([*ROOT.glob("*.py"), *(f for folder in folders for f in folder.rglob("*.py"))])


def texts() -> list[Path]:
    """Every file that people read: code, settings, documents."""
    more = [
        f
        for pattern in ("*.md", "*.toml", "*.txt", "configs/**/*.yaml", "docs/**/*.md", "scripts/*", ".ci/*")
        for f in ROOT.glob(pattern)
        if f.is_file()
    ]
    return sorted({*sources(), *more})


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _is_typing_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(tree: ast.AST, module: str, package: bool) -> list[tuple[int, str]]:
    """(line, dotted name) of every import that runs; those under TYPE_CHECKING are names for annotations."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parent = parts[: len(parts) - node.level + package]
                base = ".".join([*parent, *([base] if base else [])])
            # `from model import kernels` names a module, `from model import Cache` does not.
            for alias in node.names:
                inner = ROOT.joinpath(*base.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()
                found.append((node.lineno, f"{base}.{alias.name}" if is_module else base))
        elif not _is_typing_guard(node):
            found += imports(node, module, package)
    return found


def arrows(path: Path) -> list[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return imports(tree, module_of(path), path.name == "__init__.py")


def rank(module: str) -> int:
    return RANKS.get(module, SCHEME if module.startswith("model.position.") else 13)


every_source = pytest.mark.parametrize("path", sources(), ids=shown)


@every_source
def test_package_imports_follow_the_layers(path):
    package = path.relative_to(ROOT).parts[0]
    if package not in MAY_IMPORT:
        return
    for line, name in arrows(path):
        target = name.split(".")[0]
        if target in PACKAGES and target != package:
            assert target in MAY_IMPORT[package], f"{shown(path)}:{line}: {package} may not import {name}"
        top_level_scripts = {f.stem for f in ROOT.glob("*.py")} - {"errors"}
        assert target not in top_level_scripts, f"{shown(path)}:{line}: imports the script {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "model").rglob("*.py")), ids=shown)
def test_model_imports_follow_the_layers(path):
    module = module_of(path)
    for line, name in arrows(path):
        if name.split(".")[0] == "model":
            low, high = rank(name), rank(module)
            fine = low < high or (low == high == SCHEME)
            assert fine, f"{shown(path)}:{line}: {module} (rank {high}) may not import {name} (rank {low})"


@every_source
def test_no_imports_inside_functions(path):
    """It hides a cycle. A test or an optional extra may wait for its library, never for a module of ours."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for line, name in imports(node, module_of(path), path.name == "__init__.py"):
                ours = name.split(".")[0] in PACKAGES
                assert not ours, f"{shown(path)}:{line}: {name} is imported inside a function"


@every_source
def test_no_unpickling(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keys = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called == "torch.load":
                assert keys.get("weights_only") == "True", (
                    f"{shown(path)}:{node.lineno}: torch.load may unpickle"
                )
            if called in ("np.load", "numpy.load"):
                assert keys.get("allow_pickle", "False") == "False", f"{shown(path)}:{node.lineno}: unpickles"
            assert called not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"), (
                f"{shown(path)}:{node.lineno}: {called}"
            )
    for line, name in arrows(path):
        assert name.split(".")[0] not in ("pickle", "dill", "cloudpickle", "joblib", "shelve"), (
            f"{shown(path)}:{line}"
        )


MACHINE_PATH = re.compile(r"(?<![\w.$/~])/(?:work|tmp|home|root|Users|mnt|opt|srv|workspace|var/tmp)/\w")


@pytest.mark.parametrize("path", texts(), ids=shown)
def test_no_absolute_paths(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        assert not MACHINE_PATH.search(line), f"{shown(path)}:{number}: {line.strip()}"


@every_source
def test_every_module_has_a_docstring(path):
    if path.relative_to(ROOT).parts[0] == "tests":
        return  # the names of the tests say it
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or not tree.body, f"{shown(path)} has no docstring"


@every_source
def test_no_todo_comments(path):
    """No stub and no reminder: what is not built is an open issue."""
    words = re.compile(r"\b(TO" + "DO|FIX" + "ME|X" + "XX)\\b")
    text = path.read_text(encoding="utf-8")
    assert not words.search(text), shown(path)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            assert "NotImplemented" not in ast.unparse(node.exc), f"{shown(path)}:{node.lineno}: a stub"


def test_syntax_tree_helpers():
    """The rules above hold nothing if the walk misses an import."""
    code = (
        "import a.b\nfrom model.attention import kernels\nfrom model import Cache\nfrom . import registry\n"
        "from .base import Span\n"
        "try:\n    import c\nexcept ImportError:\n    pass\n"
        "if TYPE_CHECKING:\n    import unseen\n"
        "def f():\n    def g():\n        from data import prepare\n"
    )
    found = {name for _, name in imports(ast.parse(code), "model.position.table", package=False)}
    assert found == {
        "a.b",
        "model.attention.kernels",
        "model",
        "model.position.registry",
        "model.position.base",
        "c",
        "data",
    }
    found = {name for _, name in imports(ast.parse("from .base import Span"), "model.position", package=True)}
    assert found == {"model.position.base"}
    assert rank("model.position.schemes.rope") == rank("model.position.schemes.a_new_scheme") == SCHEME
    work = "/wo" + "rk/x"
    assert MACHINE_PATH.search(f"see {work}")
    assert not any(MACHINE_PATH.search(before + work) for before in ("runs", "~", "." * 2, "$" + "HOME"))
