"""One self-contained source file from modules of this repository.

The modeling file of an exported model consists of `modeling.py` beside this file and of the
definitions of `model/` that the model needs, so that no formula exists twice. Definitions are found
by name: a method or class attribute is kept if kept code refers to an attribute of that name.
Settings classes lose their fields and validators, since config.json gives every value; the
generated file does not need pydantic.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass, field

from interop.export.generated.sources import (
    OWN,
    ROOT,
    SETTINGS_BASE,
    References,
    bound_names,
    first_line,
    is_dataclass,
    is_module,
    is_own,
    is_protocol,
    is_settings,
    lineage,
    module_of,
    references_of,
    resolve,
)

VALIDATORS = {"model_validator", "model_serializer", "field_validator"}

# Replaces errors.py in the generated file, whose settings are plain objects, not pydantic models.
PRELUDE = '''
class ModelError(ValueError):
    """Invalid length, position or cache."""


class StrictSettings:
    """Settings as attributes, resolved and validated at export."""

    def __init__(self, **values):
        for key, value in values.items():
            setattr(self, key, _nested(key, value))

    @classmethod
    def model_validate(cls, values):
        return cls(**values)


def _nested(key, value):
    """A setting's value, with mappings converted to the settings class of their `name`."""
    if not isinstance(value, dict):
        return value
    settings_class = SETTINGS_CLASSES.get((key, value.get("name")))
    if settings_class is None:  # the kinds of layers
        return {name: _nested("kind", kind) for name, kind in value.items()}
    return settings_class(**value)
'''
PROVIDED = {"ModelError", SETTINGS_BASE}


@dataclass
class Bundle:
    """The source of a module that consists of definitions and everything they need.

    Attributes:
        whole: the module whose definitions are copied without omissions.
        settings: (key, name) of nested settings → (module, class).
        registries: the needed keys of dict literals, by name.
        kept: (module, definition), an ordered set.
        attributes: names of attributes that kept code refers to.
        instantiated: settings classes that kept code creates.
        external: imports from elsewhere, by name.
    """

    whole: str
    settings: dict[tuple[str, str | None], tuple[str, str]]
    registries: dict[str, set[str]]
    kept: dict[tuple[str, str], None] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    instantiated: set[tuple[str, str]] = field(default_factory=set)
    external: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    def source(self, roots: Sequence[str], header: str) -> str:
        """The module.

        Args:
            roots: definitions of `whole` that users of the file need.
            header: its docstring.

        Raises:
            RuntimeError: two definitions have the same name.
        """
        for module, name in [*((self.whole, root) for root in roots), *self.settings.values()]:
            self.kept[resolve(module, name)] = None
        while self._grow():
            pass
        self._check_names()
        parts = [
            f'"""{header}"""\n\nfrom __future__ import annotations\n',
            self._imports(),
            PRELUDE,
        ]
        for module in self._order():
            own = [name for name in module_of(module).definitions if (module, name) in self.kept]
            if not own:
                continue
            path = module_of(module).path.relative_to(ROOT).as_posix()
            parts.append(f"\n# {'-' * 100}\n# {path}\n")
            nodes = dict.fromkeys(module_of(module).definitions[name] for name in own)
            for node in nodes:
                spaced = isinstance(node, ast.FunctionDef | ast.ClassDef)
                parts.append(("\n\n" if spaced else "") + self._emit(module, node))
        classes = [
            f"    ({key!r}, {name!r}): {cls},"
            for (key, name), (_, cls) in sorted(self.settings.items(), key=str)
        ]
        parts.append("\n\nSETTINGS_CLASSES = {\n" + "\n".join(classes) + "\n}\n")
        return "\n".join(parts)

    def _grow(self) -> bool:
        """Add what the kept definitions refer to; returns whether anything is new."""
        before = self._sizes()
        for module, name in list(self.kept):
            for part in self._parts(module, module_of(module).definitions[name]):
                references = references_of(part)
                self.attributes |= references.attributes
                for reference in references.names:
                    self._keep(module, reference, references, needed=True)
                for reference in references.annotations:
                    self._keep(module, reference, references, needed=False)
        return before != self._sizes()

    def _sizes(self) -> list[int]:
        return list(map(len, (self.kept, self.attributes, self.instantiated, self.external)))

    def _keep(self, module: str, name: str, references: References, needed: bool) -> None:
        owner = module_of(module)
        if name in PROVIDED:
            return
        if name in owner.imports and not is_own(module, name):
            self.external[name] = owner.imports[name]
            return
        if name in owner.imports:
            source, original = owner.imports[name]
            if original is None or is_module(f"{source}.{original}"):
                return  # a module; its definitions are referred to in registries only
        elif name not in owner.definitions:
            return  # a local or built-in name
        key = resolve(module, name)
        node = module_of(key[0]).definitions[key[1]]
        if needed or isinstance(node, ast.Assign | ast.AnnAssign) or is_protocol(node):
            self.kept[key] = None
        # The wrapper creates settings from config.json, which gives every value.
        is_created = needed and module != self.whole and name in references.instantiated
        if is_created and is_settings(*key):
            self.instantiated.add(key)

    def _parts(self, module: str, node: ast.stmt) -> list[ast.AST]:
        """The parts of a definition that are copied."""
        name = bound_names(node)[0]
        if name in self.registries:
            return [value for _, value in self._entries(module, node)]
        if not isinstance(node, ast.ClassDef):
            return [node]
        members = [self._member(module, node, member) for member in node.body]
        return [
            *node.bases,
            *node.keywords,
            *node.decorator_list,
            *(member for member in members if member is not None),
        ]

    def _entries(self, module: str, node: ast.stmt) -> list[tuple[str, ast.expr]]:
        """The needed entries of a registry, with `module.Name` reduced to `Name`."""
        assert isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        imports = module_of(module).imports
        bundled = self

        class Bare(ast.NodeTransformer):
            def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
                assert isinstance(node.value, ast.Name)
                source, original = imports[node.value.id]
                bundled.kept[(f"{source}.{original}", node.attr)] = None
                return ast.Name(id=node.attr, ctx=ast.Load())

        entries = []
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            assert isinstance(key, ast.Constant)
            if key.value in self.registries[bound_names(node)[0]]:
                copied = ast.parse(ast.unparse(value), mode="eval").body
                entries.append((key.value, Bare().visit(copied)))
        return entries

    def _member(self, module: str, owner: ast.ClassDef, member: ast.stmt) -> ast.stmt | None:
        """The member of a class as it is copied, or None."""
        if module == self.whole:
            return member
        names = bound_names(member)
        of_settings = is_settings(module, owner.name)
        if isinstance(member, ast.FunctionDef):
            decorators = " ".join(map(ast.unparse, member.decorator_list))
            if of_settings and any(name in decorators for name in VALIDATORS):
                return None
            is_called = member.name.startswith("__") or member.name == "forward"
            return member if is_called or member.name in self.attributes else None
        if isinstance(member, ast.Expr) or is_dataclass(owner):
            return member
        if not names:
            return None if of_settings else member
        if names[0] not in self.attributes:
            return None
        if not of_settings:
            return member
        if isinstance(member, ast.AnnAssign) and "ClassVar" not in ast.unparse(member.annotation):
            return self._default(module, owner, member)
        return member

    def _default(self, module: str, owner: ast.ClassDef, member: ast.AnnAssign) -> ast.stmt | None:
        """A settings field as a class attribute, where code creates settings without giving all
        values."""
        if not any((module, owner.name) in lineage(*key) for key in self.instantiated):
            return None
        value = member.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
            value = value.args[0] if value.args else None
        if value is None or ast.unparse(value) == "...":
            return None
        return ast.Assign(targets=[member.target], value=value, lineno=member.lineno)

    def _emit(self, module: str, node: ast.stmt) -> str:
        owner = module_of(module)
        name = bound_names(node)[0]
        if name in self.registries:
            entries = [
                f"    {key!r}: {ast.unparse(value)}," for key, value in self._entries(module, node)
            ]
            return f"{name} = {{\n" + "\n".join(entries) + "\n}"
        if not isinstance(node, ast.ClassDef):
            return owner.text(node)
        members = [(m, self._member(module, node, m)) for m in node.body]
        if all(kept is m for m, kept in members):
            return owner.text(node)
        head = owner.text(node).splitlines()
        first = first_line(node)
        length = first_line(node.body[0]) - first + (len(head) - (node.end_lineno or 0) + first - 1)
        out = [line for line in head[:length] if line.strip()]
        for member, kept in members:
            if kept is None:
                continue
            if isinstance(kept, ast.FunctionDef):
                out.append("")
            if kept is member:
                out.append(owner.text(kept))
            else:
                out.append("    " + ast.unparse(ast.fix_missing_locations(kept)))
        if not any(kept for _, kept in members):
            out.append("    pass")
        return "\n".join(out)

    def _order(self) -> list[str]:
        """Modules after those that they import."""
        order: dict[str, None] = {}
        kept = {module for module, _ in self.kept}

        def visit(name: str, parents: tuple[str, ...]) -> None:
            if name in order or name in parents:
                return
            for node in module_of(name).tree.body:
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OWN:
                    assert node.module is not None
                    for alias in node.names:
                        inner = f"{node.module}.{alias.name}"
                        visit(inner if is_module(inner) else node.module, (*parents, name))
            order[name] = None

        for module in sorted(kept):
            visit(module, ())
        return [name for name in order if name in kept]

    def _check_names(self) -> None:
        owners: dict[str, str] = dict.fromkeys(PROVIDED, "the prelude") | {"_nested": "the prelude"}
        for module, name in self.kept:
            other = "an import" if name in self.external else owners.get(name, module)
            if other != module or hasattr(builtins, name):
                raise RuntimeError(f"{module}.{name} has the same name as a definition elsewhere")
            owners[name] = module

    def _imports(self) -> str:
        lines = []
        for name, (module, original) in sorted(self.external.items()):
            if module == "__future__":
                continue
            if original is None:
                alias = "" if name == module.split(".")[0] else f" as {name}"
                lines.append(f"import {module}{alias}")
            else:
                alias = "" if name == original else f" as {name}"
                lines.append(f"from {module} import {original}{alias}")
        return "\n".join(sorted(lines, key=lambda line: (line.startswith("from"), line))) + "\n"
