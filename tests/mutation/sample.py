"""Draw edits of the code with cosmic-ray's mutation operators, and report which tests catch them.

    pip install -e '.[mutation,test]'
    python tests/mutation/sample.py --seed 7 --count 100            about an hour on 1 core
    python tests/mutation/sample.py --seed 7 --packages model training --nearest 20

An edit is drawn by its line, each line of the packages being equally likely, then by its operator;
annotations are left out. Each edit runs the tests nearest to it by imports and names; it is caught
if one of them fails. docs/results/mutation_sample.md judges the survivors of such a sample.
"""

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
NOT_EDITED = {"tests", "scripts", "docs", "configs"}
# These require the name of a variable.
LEFT_OUT = ("VariableReplacer", "VariableInserter")
TEST_SECONDS = 120
EDIT_SECONDS = 400
# Exit statuses of pytest: a test failed, collection was interrupted, or a module was not imported.
CAUGHT = (1, 2, 4)


@dataclass(frozen=True)
class Edit:
    """`text` and `code`: the whole file before and after; `old` and `new`: the edited line."""

    file: Path
    line: int
    operator: str
    text: str
    code: str

    @property
    def old(self) -> str:
        return self._line_of(self.text)

    @property
    def new(self) -> str:
        return self._line_of(self.code)

    def _line_of(self, text: str) -> str:
        before = self.text.splitlines()
        after = self.code.splitlines()
        for i, (old, new) in enumerate(zip(before, after, strict=False)):
            if old != new:
                return text.splitlines()[i].strip()
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True, help="seed of the draw")
    parser.add_argument("--count", type=int, default=100, help="edits drawn")
    parser.add_argument("--commit", default="HEAD", help="commit whose code is edited and tested")
    parser.add_argument("--packages", nargs="+", default=[], help="only these; all by default")
    parser.add_argument("--nearest", type=int, default=6, help="tests run for each edit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        archive = ["git", "archive", options.commit]
        packed = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        edits = draw(tree, random.Random(options.seed), options.packages)
        verdicts = []
        print("| | line | operator | was | edited | verdict |\n|---|---|---|---|---|---|")
        for number in range(1, options.count + 1):
            edit = next(edits)
            verdicts.append(verdict(tree, edit, nearest_tests(tree, edit)[: options.nearest]))
            place = f"{edit.file.relative_to(tree)}:{edit.line}"
            cells = [str(number), place, edit.operator, f"`{edit.old}`", f"`{edit.new}`"]
            cells.append(verdicts[-1])
            print("|", " | ".join(cell.replace("|", "\\|") for cell in cells), "|", flush=True)
    caught = sum(text.startswith("caught") for text in verdicts)
    print(f"\nseed {options.seed}, commit {options.commit}: {caught} of {len(verdicts)} caught")
    return 0


def draw(tree: Path, rng: random.Random, names: list[str]) -> Iterator[Edit]:
    """Edits of random lines, no line twice; of the packages with these names, or of the whole
    product without names."""
    packages = {file.parent for file in tree.glob("*/__init__.py")}
    files = [
        file
        for package in sorted(packages)
        if package.name not in NOT_EDITED and package.name in (names or [package.name])
        for file in sorted(package.rglob("*.py"))
    ]
    scripts = [] if names else sorted(tree.glob("*.py"))
    lines = [
        (file, line)
        for file in [*files, *scripts]
        for line in range(1, len(file.read_text(encoding="utf-8").splitlines()) + 1)
    ]
    rng.shuffle(lines)
    for file, line in lines:
        by_operator = edits_of_line(file, line)
        if not by_operator:
            continue
        operator, index = rng.choice(by_operator[rng.choice(sorted(by_operator))])
        text = file.read_text(encoding="utf-8")
        code = mutate_code(text, get_operator(operator)(), index)
        try:
            compile(code, str(file), "exec", dont_inherit=True)
        except SyntaxError:
            continue
        yield Edit(file, line, operator.split("/")[1], text, code)


@cache
def nodes_of(file: Path) -> list:
    return list(ast_nodes(get_ast(file.read_text(encoding="utf-8"))))


def edits_of_line(file: Path, line: int) -> dict[str, list[tuple[str, int]]]:
    """Kind of operator → (operator, its number in the file) of the edits of a line."""
    kinds: dict[str, list[tuple[str, int]]] = {}
    near = [node for node in nodes_of(file) if node.start_pos[0] <= line <= node.end_pos[0]]
    for name in operator_names():
        kind = name.split("/")[1].split("_")[0]
        if kind in LEFT_OUT:
            continue
        operator = get_operator(name)()
        if not any(is_edited(operator, node, line) for node in near):
            continue
        places = [
            (node, place[0])
            for node in nodes_of(file)
            for place, _ in operator.mutation_positions(node)
        ]
        for index, (node, place) in enumerate(places):
            if place == line and not in_annotation(node):
                kinds.setdefault(kind, []).append((name, index))
    return kinds


def is_edited(operator, node, line: int) -> bool:
    return any(place[0] == line for place, _ in operator.mutation_positions(node))


def in_annotation(node) -> bool:
    while node.parent is not None:
        before = getattr(node.get_previous_sibling(), "value", None)
        if (node.parent.type, before) in (("tfpdef", ":"), ("annassign", ":"), ("funcdef", "->")):
            return True
        node = node.parent
    return False


def nearest_tests(tree: Path, edit: Edit) -> list[str]:
    """Tests whose files reach the edited module by imports. First those that name the function or
    class that holds the edit, then those with the fewest imports between."""
    around = names_around(edit)
    ranked = []
    for file in sorted((tree / "tests").rglob("test_*.py")):
        steps = import_distances(tree, file).get(edit.file)
        if steps is None:
            continue
        named = edit.file.stem in file.stem
        same_folder = edit.file.parent.name == file.parent.name
        for name, source in functions(file).items():
            mentioned = sum(re.search(rf"\b{word}\b", source) is not None for word in around)
            score = 4 * min(mentioned, 2) + 6 * named + 2 * same_folder - 2 * steps
            if name.startswith("test_"):
                ranked.append((-score, len(source), f"{file.relative_to(tree)}::{name}"))
    return [name for _, _, name in sorted(ranked)]


def names_around(edit: Edit) -> set[str]:
    """Names of the functions and classes that hold the edited line, and of the module."""
    held = {
        node.name
        for node in ast.walk(ast.parse(edit.text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.lineno <= edit.line <= (node.end_lineno or 0)
        and not node.name.startswith("__")
    }
    return held - {"main"} | {edit.file.stem}


@cache
def functions(file: Path) -> dict[str, str]:
    """Source of each function of a file, decorators included."""
    text = file.read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.get_source_segment(text, part) or "" for part in node.decorator_list]
            found[node.name] = "\n".join([*decorators, ast.get_source_segment(text, node) or ""])
    return found


@cache
def import_distances(tree: Path, start: Path) -> dict[Path, int]:
    """File → number of imports between it and `start`."""
    steps = {start: 0}
    queue = [start]
    for file in queue:
        for imported in imported_files(tree, file):
            if imported not in steps:
                steps[imported] = steps[file] + 1
                queue.append(imported)
    return steps


@cache
def imported_files(tree: Path, file: Path) -> list[Path]:
    """The tree's files that a file imports."""
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = file.relative_to(tree).parent.parts
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    paths = [tree.joinpath(*name.split(".")) for name in dict.fromkeys(names)]
    candidates = [
        file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))
    ]
    return [file for file in candidates if file.is_file()]


def verdict(tree: Path, edit: Edit, tests: list[str]) -> str:
    """Run the tests on the edited tree, and restore it."""
    if not tests:
        return "survived: no test"
    words = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
    edit.file.write_text(edit.code, encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, *tests],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=EDIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"caught: not finished after {EDIT_SECONDS} s"
    finally:
        edit.file.write_text(edit.text, encoding="utf-8")
    failure = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    if done.returncode in CAUGHT:
        return f"caught: {failure[1] if failure else f'exit status {done.returncode}'}"
    if done.returncode == 0:
        return f"survived: {len(tests)} tests"
    return f"not run: exit status {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
