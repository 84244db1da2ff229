"""Draw edits of the code with cosmic-ray's mutation operators, and check that the tests catch each.

    pip install -e '.[mutation,test]'
    python tests/mutation/sample.py --commit d265f32           200 edits; about half an hour on 1 core

The draw is fixed by the commit and the seed: lines are drawn in proportion to the packages' sizes, then one
of the operators that apply, then one of its edits; annotations are left out. An edit runs the tests nearest
to it by imports and names. The table is written after every edit; edits that it lists with a verdict are not
run again. Where an edit survives those tests, its verdict is edited by hand: another test that catches it, a
test added (`+`), or why the edit changes nothing.
"""

import ast
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hypothesis  # noqa: F401
import matplotlib.pyplot  # noqa: F401  (imported once here, not once per edit)
import numpy  # noqa: F401
import pytest
import scipy.stats  # noqa: F401
import torch
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from transformers import LlamaForCausalLM  # noqa: F401

from data.files import write_text
from settings.script import Parser, run_main
from tests.mutation.check import ROOT, first_failure
from training.logging.console import Console

PACKAGES = ("model", "data", "training", "evaluation", "studies", "generation")
LEFT_OUT = ("VariableReplacer", "VariableInserter")  # need a variable's name
TEST_SECONDS = 120
EDIT_SECONDS = 300


@dataclass(frozen=True)
class Edit:
    file: str
    line: int
    operator: str
    old: str  # the changed lines
    new: str
    text: str  # the whole file
    code: str  # the whole file, edited


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--count", type=int, default=200, help="edits drawn")
    parser.add_argument("--seed", type=int, default=12, help="seed of the draw")
    parser.add_argument("--commit", default="HEAD", help="commit whose code is edited and tested")
    parser.add_argument("--nearest", type=int, default=6, help="tests run for each edit")
    parser.add_argument("--only", type=int, nargs="*", help="run these edits, by number")
    parser.add_argument(
        "--out", default="docs/results/mutation_sample.md", help="the table, in Markdown"
    )
    options = parser.parse_args()
    out = Path(options.out)
    console = Console()
    commit = git("rev-parse", "--short=10", options.commit).decode().strip()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        subprocess.run(["tar", "-x", "-C", tree], input=git("archive", commit), check=True)
        edits = draw(tree, options.count, options.seed)
        verdicts = read(out)
        for number, edit in enumerate(edits, 1):
            if number not in (options.only or range(1, len(edits) + 1)) or number in verdicts:
                continue
            verdicts[number] = test(tree, edit, tests_of(tree, edit)[: options.nearest])
            console.info(f"{number} {edit.file}:{edit.line} {verdicts[number]}")
            write_text(out, report(edits, verdicts, f"commit {commit}, seed {options.seed}"))
    write_text(out, report(edits, verdicts, f"commit {commit}, seed {options.seed}"))
    return 0


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


def draw(tree: Path, count: int, seed: int) -> list[Edit]:
    """Edits in proportion to each package's lines, no line twice."""
    rng = random.Random(seed)
    places = {
        package: [
            (file, line)
            for file in sorted((tree / package).rglob("*.py"))
            for line in range(1, len(file.read_text(encoding="utf-8").splitlines()) + 1)
        ]
        for package in PACKAGES
    }
    sizes = [len(found) for found in places.values()]
    edits = []
    bounds = [round(count * sum(sizes[:i]) / sum(sizes)) for i in range(len(sizes) + 1)]
    for package, (start, stop) in zip(PACKAGES, pairwise(bounds), strict=True):
        rng.shuffle(places[package])
        found = (edit for place in places[package] if (edit := edit_at(tree, *place, rng)))
        edits += [next(found) for _ in range(stop - start)]
    return edits


def edit_at(tree: Path, file: Path, line: int, rng: random.Random) -> Edit | None:
    """An edit of the line by an operator drawn from those that apply to it; None where none does."""
    kinds = {}
    for operator, index in mutations(file, line):
        kinds.setdefault(operator.split("/")[1].split("_")[0], []).append((operator, index))
    if not kinds:
        return None
    operator, index = rng.choice(kinds[rng.choice(sorted(kinds))])
    text = file.read_text(encoding="utf-8")
    code = mutate_code(text, get_operator(operator)(), index)
    old, new = changed(text, code)
    try:
        compile(code, str(file), "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return Edit(str(file.relative_to(tree)), line, operator.split("/")[1], old, new, text, code)


@cache
def nodes_of(file: Path) -> list:
    return list(ast_nodes(get_ast(file.read_text(encoding="utf-8"))))


def mutations(file: Path, line: int) -> list[tuple[str, int]]:
    """(operator, number of its occurrence in the file) of every edit of the line, annotations left out."""
    near = [n for n in nodes_of(file) if n.start_pos[0] <= line <= n.end_pos[0]]
    found = []
    for name in operator_names():
        operator = get_operator(name)
        if name.split("/")[1] in LEFT_OUT or not any(places(operator, n, line) for n in near):
            continue
        all_places = [(n, at) for n in nodes_of(file) for at, _ in operator().mutation_positions(n)]
        found += [
            (name, i)
            for i, (n, at) in enumerate(all_places)
            if at[0] == line and not in_annotation(n)
        ]
    return found


def places(operator, node, line: int) -> bool:
    return any(at[0] == line for at, _ in operator().mutation_positions(node))


def in_annotation(node) -> bool:
    while node.parent is not None:
        before = getattr(node.get_previous_sibling(), "value", None)
        if (node.parent.type, before) in (("tfpdef", ":"), ("annassign", ":"), ("funcdef", "->")):
            return True
        node = node.parent
    return False


def changed(text: str, code: str) -> tuple[str, str]:
    """The lines that differ, without those that both share at either end."""
    old = text.splitlines()
    new = code.splitlines()
    while old and new and old[0] == new[0]:
        old = old[1:]
        new = new[1:]
    while old and new and old[-1] == new[-1]:
        old = old[:-1]
        new = new[:-1]
    return " ".join(x.strip() for x in old), " ".join(x.strip() for x in new)


def tests_of(tree: Path, edit: Edit) -> list[str]:
    """Tests in the files that reach the edited module by imports, nearest first.

    A file is near when it is named after the module, names it, or imports it; a test when it names the edited
    function or class, or a function of the module that calls it.
    """
    module = module_of(tree, tree / edit.file)
    package = edit.file.split("/")[0]
    stem = Path(edit.file).stem
    (inner, outer) = names_around(edit)
    ranked = []
    for file in sorted((tree / "tests").rglob("test_*.py")):
        steps = distances(tree, file).get(module)
        if steps is None:
            continue
        here = file.parent.name == package
        named = here and re.search(rf"test_{stem}(_|\b)", file.stem) is not None
        for name, text in functions(file).items():
            if name.startswith("test_"):
                score = 6 * named + 2 * here - 2 * steps + mentions({stem}, text)
                score += 4 * mentions(inner, text) + mentions(outer, text)
                ranked.append((-score, len(text), f"{file.relative_to(tree)}::{name}"))
    return [name for _, _, name in sorted(ranked)]


def mentions(names: set[str], text: str) -> int:
    return sum(re.search(rf"\b{name}\b", text) is not None for name in names)


@cache
def functions(file: Path) -> dict[str, str]:
    """Source of each function of a file, decorators included."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    first = [min([n.lineno, *(d.lineno for d in n.decorator_list)]) for n in found]
    return {
        n.name: "\n".join(lines[at - 1 : n.end_lineno]) for n, at in zip(found, first, strict=True)
    }


def names_around(edit: Edit) -> tuple[set[str], set[str]]:
    """Names of the functions and classes that hold the edited line; of those in the file that use one."""
    tree = ast.parse(edit.text)
    lines = edit.text.splitlines()
    found = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    found = [n for n in found if not n.name.startswith("__") and n.name != "main"]
    inner = {n.name for n in found if n.lineno <= edit.line <= (n.end_lineno or 0)}
    outer = {n.name for n in found if mentions(inner, "\n".join(lines[n.lineno : n.end_lineno]))}
    return inner, outer - inner


@cache
def distances(tree: Path, start: Path) -> dict[str, int]:
    """Module → number of imports between it and the file."""
    steps = {module_of(tree, start): 0}
    queue = [start]
    for file in queue:
        near = steps[module_of(tree, file)] + 1
        for name in imported(tree, file):
            if name not in steps:
                steps[name] = near
                queue.append(path_of(tree, name))
    return steps


@cache
def imported(tree: Path, file: Path) -> list[str]:
    """The tree's modules that the file imports, packages among them."""
    package = module_of(tree, file).split(".")
    package = package if file.name == "__init__.py" else package[:-1]
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
            )
            base = base if node.level else node.module or ""
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in dict.fromkeys(found) if name and path_of(tree, name)]


def module_of(tree: Path, file: Path) -> str:
    parts = file.relative_to(tree).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(tree: Path, module: str) -> Path | None:
    path = tree.joinpath(*module.split("."))
    return next((f for f in (path / "__init__.py", path.with_suffix(".py")) if f.is_file()), None)


def test(tree: Path, edit: Edit, tests: list[str]) -> str:
    file = tree / edit.file
    stat = file.stat()
    file.write_text(edit.code, encoding="utf-8")
    status, by = run(tree, tests)
    file.write_text(edit.text, encoding="utf-8")
    os.utime(file, (stat.st_atime, stat.st_mtime))
    if status not in (0, 1, 2, 4):  # of pytest: passed, failed, not collected, not imported
        return f"not run: pytest ends with {status} {by}"
    return f"caught: {by}" if status else f"survived: {', '.join(tests)}"


def run(tree: Path, tests: list[str]) -> tuple[int | None, str]:
    """(pytest's exit status or None, its first failure) of a child with the libraries imported already."""
    output = tree.parent / "output"
    output.write_text("", encoding="utf-8")
    child = os.fork()
    if child == 0:
        try:
            os._exit(run_here(tree, tests, output))
        except BaseException:
            os._exit(70)
    end = time.monotonic() + EDIT_SECONDS
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None, f"within {EDIT_SECONDS} s"
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(done[1]), first_failure(output.read_text(encoding="utf-8"))


def run_here(tree: Path, tests: list[str], output: Path) -> int:
    """pytest's exit status; this process is of no other use afterwards."""
    os.setsid()
    os.chdir(tree)
    for name in [
        m for m in sys.modules if m.split(".")[0] in (*PACKAGES, "errors", "scripts", "tests")
    ]:
        del sys.modules[name]
    sys.path[0] = str(tree)
    sys.stdout = sys.stderr = output.open("w", encoding="utf-8", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    # The libraries imported above are warned about: their asserts are not rewritten.
    words = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    files = [list(group) for _, group in groupby(tests, key=lambda test: test.split("::")[0])]
    return next(filter(None, (int(pytest.main([*words, *group])) for group in files)), 0)


def read(out: Path) -> dict[int, str]:
    """Number → verdict of the edits in the table that have one."""
    rows = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    found = [re.match(r"\| (\d+) \| .* \| (.*) \|$", row) for row in rows]
    return {int(m[1]): m[2].replace("\\|", "|") for m in found if m and m[2] != "not run"}


def report(edits: list[Edit], verdicts: dict[int, str], drawn: str) -> str:
    kinds = [v.split(":")[0] for v in verdicts.values()]
    counts = ", ".join(f"{kinds.count(k)} {k}" for k in sorted(set(kinds)))
    added = sum(v.startswith("caught: +") for v in verdicts.values())
    lines = [
        "# Mutation sample",
        "",
        f"`python tests/mutation/sample.py`: {len(edits)} edits drawn with cosmic-ray's operators "
        f"({drawn}), {len(kinds)} of them judged: {counts}. The {added} marked `+` survived the tests "
        "nearest to them; the test named is the one added or extended for it.",
        "",
        "| | line | operator | was | edited | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for number, e in enumerate(edits, 1):
        cells = [str(number), f"{e.file}:{e.line}", e.operator, f"`{e.old}`", f"`{e.new}`"]
        cells.append(verdicts.get(number, "not run"))
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_main(main)
