"""Code rules that a syntax tree can show: allowed imports between packages, and forbidden
constructs.
"""

import ast
import re
import subprocess
import sys
import sysconfig
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.files import ROOT
from tests.gpu_path.common import PATCHED

# What each package may import of the others. Top-level scripts and tests may import any of them,
# and all may import errors.py.
MAY_IMPORT = {
    "settings": set(),
    "model": {"settings"},
    "data": {"settings"},
    "generation": {"settings", "model", "data"},
    "run_directory": {"settings", "model", "data"},
    "training": {"settings", "model", "data", "generation", "run_directory"},
    "evaluation": {"settings", "model", "data", "generation", "run_directory"},
    "studies": {"settings", "model", "data", "training", "evaluation", "run_directory"},
}
MAY_IMPORT["interop"] = {*MAY_IMPORT} - {"studies"}
PACKAGES = {*MAY_IMPORT, "scripts", "tests"}
# Parts of the model, lowest first: modules import those of their own part and of lower lines.
PARTS = """
model.token_positions model.loss model.devices
model.attention
model.position
model.cache
model.sharding
model.mixers
model.model_settings
model.carried_state model.block
model.transformer
model.decoding
model
"""
RANKS = {
    part: level for level, line in enumerate(PARTS.strip().splitlines()) for part in line.split()
}


def sources() -> list[Path]:
    """Every Python file of the product and its tests."""
    files = list(ROOT.glob("*.py"))
    for name in PACKAGES:
        files += (ROOT / name).rglob("*.py")
    return sorted(files)


def texts() -> list[Path]:
    """Every file that people read: code, settings, documents."""
    patterns = [
        "*.md",
        "*.toml",
        "*.txt",
        "configs/**/*.yaml",
        "docs/**/*.md",
        "scripts/*",
        ".ci/*",
    ]
    more = [file for pattern in patterns for file in ROOT.glob(pattern) if file.is_file()]
    return sorted({*sources(), *more})


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _is_typing_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def imports(tree: ast.AST, module: str, package: bool) -> list[tuple[int, str]]:
    """(line, dotted name) of every import that runs; those under TYPE_CHECKING are names for
    annotations."""
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


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def arrows(path: Path) -> list[tuple[int, str]]:
    return imports(parsed(path), module_of(path), path.name == "__init__.py")


def part_of(module: str) -> str:
    """The part of the model that a module belongs to; fails for a module of none."""
    folder = ".".join(module.split(".")[:2])
    return folder if folder in RANKS else module


def test_package_imports_follow_the_layers():
    top_level_scripts = {f.stem for f in ROOT.glob("*.py")} - {"errors"}
    wrong = []
    for path in sources():
        package = path.relative_to(ROOT).parts[0]
        if package not in MAY_IMPORT:
            continue
        for line, name in arrows(path):
            target = name.split(".")[0]
            if target in PACKAGES - {package} - MAY_IMPORT[package]:
                wrong.append(f"{shown(path)}:{line}: {package} may not import {name}")
            if target in top_level_scripts:
                wrong.append(f"{shown(path)}:{line}: imports the script {name}")
    assert wrong == []


def test_model_imports_follow_the_layers():
    imported = {
        module_of(path): {name for _, name in arrows(path) if name.split(".")[0] == "model"}
        for path in sorted((ROOT / "model").rglob("*.py"))
    }
    TopologicalSorter(imported).prepare()  # raises CycleError
    wrong = [
        f"{module} may not import {name}"
        for module, names in imported.items()
        for name in names
        if (low := part_of(name)) != (high := part_of(module)) and RANKS[low] >= RANKS[high]
    ]
    assert wrong == []


def test_imports_inside_functions_hide_no_cycle():
    """A function may import a package below its own, for start-up time, but no module of its
    own."""
    wrong = [
        f"{shown(path)}:{line}: {name} is imported inside a function"
        for path in sources()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for line, name in imports(node, module_of(path), path.name == "__init__.py")
        if name.split(".")[0] == path.relative_to(ROOT).parts[0]
    ]
    assert wrong == []


CHANGED_PROCESS = re.compile(
    r"sys\.path\.(insert|append|extend)|sys\.path\[|\brunpy\b|sys\.argv = "
)


def clone_line(path: Path) -> str:
    """The one line by which a script finds the clone that it is part of."""
    parent = len(path.relative_to(ROOT).parts) - 1
    return f"sys.path.insert(0, str(Path(__file__).resolve().parents[{parent}]))"


def test_no_changed_search_path_and_no_scripts_run_as_modules():
    """Packages are found in the clone; what scripts share lives in packages. Only the files in
    scripts/, which Python starts with their own folder on its path, add the clone."""
    wrong = [
        f"{shown(path)}:{number}: {line.strip()}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] != "tests"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if CHANGED_PROCESS.search(line)
        and not (path.is_relative_to(ROOT / "scripts") and line.startswith(clone_line(path)))
    ]
    assert wrong == []


def test_every_script_adds_the_clone_before_it_imports_from_it():
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "scripts").rglob("*.py")}
    scripts = {path: text for path, text in texts.items() if "__main__" in text}
    assert len(scripts) > 9
    for path, text in scripts.items():
        lines = text.splitlines()
        first = next(
            number
            for number, line in enumerate(lines)
            if (name := re.match(r"(?:from|import) (\w+)", line))
            and ((ROOT / name[1]).is_dir() or (ROOT / f"{name[1]}.py").is_file())
        )
        assert any(line.startswith(clone_line(path)) for line in lines[:first]), shown(path)


def test_a_script_runs_where_nothing_is_installed_but_the_dependencies(tmp_path):
    """-I and -S: no PYTHONPATH, and no editable install, which a .pth file of the site adds."""
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"text {i} " * 20)
    script = ROOT / "scripts" / "prepare.py"
    arguments = ["--data", "texts", "data.tokenizer.name=bytes"]
    start = (
        "import importlib.util, runpy, sys\n"
        f"sys.path.append({sysconfig.get_paths()['purelib']!r})\n"
        "assert importlib.util.find_spec('run_directory') is None\n"
        f"sys.argv = [{str(script)!r}, *{arguments!r}]\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / done.stdout.splitlines()[-1] / "prepared.json").is_file()


def test_model_imports_nothing_for_types_only():
    """It would hide a cycle."""
    wrong = [
        shown(path)
        for path in sorted((ROOT / "model").rglob("*.py"))
        for node in ast.walk(parsed(path))
        if _is_typing_guard(node) and imports(node, module_of(path), path.name == "__init__.py")
    ]
    assert wrong == []


def may_unpickle(call: ast.Call) -> bool:
    called = ast.unparse(call.func)
    keys = {k.arg: ast.unparse(k.value) for k in call.keywords}
    return (
        (called == "torch.load" and keys.get("weights_only") != "True")
        or (called in ("np.load", "numpy.load") and keys.get("allow_pickle", "False") != "False")
        # BaseLoader makes nothing but text
        or (called == "yaml.load" and keys.get("Loader") != "yaml.BaseLoader")
        or called in ("yaml.unsafe_load", "yaml.full_load", "eval", "exec")
    )


def test_no_unpickling():
    calls = [
        f"{shown(path)}:{node.lineno}: {ast.unparse(node.func)}"
        for path in sources()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and may_unpickle(node)
    ]
    modules = [
        f"{shown(path)}:{line}: {name}"
        for path in sources()
        for line, name in arrows(path)
        if name.split(".")[0] in ("pickle", "dill", "cloudpickle", "joblib", "shelve")
    ]
    assert calls == modules == []


MACHINE_PATH = re.compile(
    r"(?<![\w.$/~])/(?:work|tmp|home|root|Users|mnt|opt|srv|workspace|var/tmp)/\w"
)


def test_no_absolute_paths():
    wrong = [
        f"{shown(path)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert wrong == []


def test_every_module_has_a_docstring():
    """In tests, the names of the tests say it."""
    wrong = []
    for path in sources():
        tree = parsed(path)
        is_test = path.relative_to(ROOT).parts[0] == "tests"
        if not is_test and tree.body and not ast.get_docstring(tree):
            wrong.append(shown(path))
    assert wrong == []


def test_no_todo_comments():
    """No stub and no reminder: what is not built is an open issue."""
    words = re.compile(r"\b(TO" + "DO|FIX" + "ME|X" + "XX)\\b")
    assert [
        shown(path) for path in sources() if words.search(path.read_text(encoding="utf-8"))
    ] == []
    stubs = [
        f"{shown(path)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and "NotImplemented" in ast.unparse(node.exc)
    ]
    assert stubs == []


def test_the_pinned_torch_is_the_one_whose_internals_tests_patch():
    """Tests of the GPU path are skipped for any other release."""
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1].startswith(f"{PATCHED}.")


def test_modules_import_on_windows():
    """Modules that only POSIX systems have are imported where they are used, if at all."""
    posix = {"fcntl", "grp", "pwd", "resource", "termios"}
    for file in sources():
        if file.relative_to(ROOT).parts[0] == "tests":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
                assert not posix & names, f"{file}:{node.lineno}"
