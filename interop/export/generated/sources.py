"""Definitions in the source files of this repository, and the names that they refer to."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# top-level packages whose code is copied; all else is imported
OWN = ("model", "interop", "settings", "errors")
SETTINGS_BASE = "StrictSettings"


@dataclass(frozen=True)
class Module:
    """A source file of this repository, by its dotted name."""

    name: str

    @cached_property
    def path(self) -> Path:
        plain = ROOT / (self.name.replace(".", "/") + ".py")
        return plain if plain.is_file() else ROOT / self.name.replace(".", "/") / "__init__.py"

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def lines(self) -> list[str]:
        return self.source.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """Top-level functions, classes and assignments by name, in the order of the source."""
        definitions: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            for name in bound_names(node):
                definitions[name] = node
        return definitions

    @cached_property
    def imports(self) -> dict[str, tuple[str, str | None]]:
        """Imported names: (module, name in it), or (module, None) for `import module as name`."""
        imports: dict[str, tuple[str, str | None]] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    imports[alias.asname or alias.name.split(".")[0]] = (alias.name, None)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    imports[alias.asname or alias.name] = (node.module, alias.name)
        return imports

    def text(self, node: ast.stmt) -> str:
        """The source of a statement, with its decorators and the comments directly above it."""
        start = first_line(node) - 1
        while start > 0 and self.lines[start - 1].lstrip().startswith("#"):
            start -= 1
        return "\n".join(self.lines[start : node.end_lineno])


def first_line(node: ast.stmt) -> int:
    """The first line of a statement or of its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def bound_names(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        targets = [t for target in node.targets for t in getattr(target, "elts", [target])]
        return [t.id for t in targets if isinstance(t, ast.Name)]
    if (
        isinstance(node, ast.AnnAssign)
        and node.value is not None
        and isinstance(node.target, ast.Name)
    ):
        return [node.target.id]
    return []


class References(ast.NodeVisitor):
    """Names and attributes that code refers to; those of annotations, which are never evaluated,
    apart."""

    def __init__(self):
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.annotations: set[str] = set()
        self.instantiated: set[str] = set()  # names called, or whose method is called

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.attributes.add(node.attr)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        if isinstance(called, ast.Name):
            self.instantiated.add(called.id)
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self._annotation(node.annotation)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._annotation(node.annotation)
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._annotation(node.returns)
        for part in (*node.decorator_list, node.args, *node.body):
            self.visit(part)

    def _annotation(self, node: ast.expr | None) -> None:
        if node is not None:
            self.annotations |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


module_of = cache(Module)  # parsed once


@cache
def references_of(node: ast.AST) -> References:
    references = References()
    references.visit(node)
    return references


@cache
def resolve(module: str, name: str) -> tuple[str, str]:
    """The module that defines a name, through re-exports."""
    owner = module_of(module)
    if name in owner.definitions:
        return module, name
    source, original = owner.imports[name]
    assert original is not None
    return resolve(source, original)


@cache
def lineage(module: str, name: str) -> tuple[tuple[str, str], ...]:
    """A class and those of its bases whose code is copied, as (module, class)."""
    node = module_of(module).definitions.get(name)
    classes = [(module, name)]
    for base in node.bases if isinstance(node, ast.ClassDef) else []:
        if isinstance(base, ast.Name) and is_own(module, base.id):
            classes += lineage(*resolve(module, base.id))
    return tuple(classes)


def is_settings(module: str, name: str) -> bool:
    return any(base == SETTINGS_BASE for _, base in lineage(module, name))


def is_own(module: str, name: str) -> bool:
    """Whether a name of a module is defined in this repository."""
    owner = module_of(module)
    return name in owner.definitions or (
        name in owner.imports and owner.imports[name][0].split(".")[0] in OWN
    )


@cache
def is_module(name: str) -> bool:
    return (ROOT / (name.replace(".", "/") + ".py")).is_file()


def is_protocol(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        ast.unparse(base) == "Protocol" for base in node.bases
    )


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(d) for d in node.decorator_list)
