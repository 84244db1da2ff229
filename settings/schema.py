"""Settings as a JSON schema: what may be set, with which type, limits, default and description.

`schema_of` generates the schema of a pydantic class.  scripts/docs/make_schema.py writes the schemas to
configs/schema, where editors and the command line read them without importing the classes and torch.
"""

import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "schema"
SUFFIXED = r"^([-+]?[0-9][0-9_]*(?:\.[0-9]+)?|[-+]?\.[0-9]+)\s?([kKMBGT])$"  # 200M, 1.5B
LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {  # and when a value is outside
    "exclusiveMinimum": ("greater than", operator.le),
    "minimum": ("at least", operator.lt),
    "exclusiveMaximum": ("less than", operator.ge),
    "maximum": ("at most", operator.gt),
}
# pydantic writes limits of a union under its own names.
_PYDANTIC_LIMITS = {
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "lt": "exclusiveMaximum",
    "le": "maximum",
}
TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
}


class _Generator(GenerateJsonSchema):
    """The schema of settings files, which may each set only some keys and may write numbers as 200M."""

    def int_schema(self, schema):
        return super().int_schema(schema) | {"type": ["integer", "string"], "pattern": SUFFIXED}

    def float_schema(self, schema):
        return super().float_schema(schema) | {"type": ["number", "string"], "pattern": SUFFIXED}

    def tagged_union_schema(self, schema):
        return {"anyOf": super().tagged_union_schema(schema)["oneOf"]}

    def get_default_value(self, schema):
        factory = schema.get("default_factory")
        if factory is None or schema.get("default_factory_takes_data"):
            return super().get_default_value(schema)
        return cast(Callable[[], Any], factory)()

    def default_schema(self, schema):
        found = super().default_schema(schema)
        if schema.get("default_factory_takes_data"):  # derived from other settings where it is null
            return {"anyOf": [found, {"type": "null"}], "default": None}
        return found

    def field_title_should_be_set(self, schema) -> bool:
        return False

    def generate(self, schema, mode="validation"):
        found = super().generate(schema, mode)
        for group in (found, *found.get("$defs", {}).values()):
            for key in ("required", "title"):
                group.pop(key, None)
            for field in group.get("properties", {}).values():
                for key in _PYDANTIC_LIMITS.keys() & field.keys():
                    field[_PYDANTIC_LIMITS[key]] = field.pop(key)
        return found


@dataclass(frozen=True, eq=False)
class SchemaNode:
    """One setting, one group of settings or one choice of a kind, with the definitions it refers to.

    Attributes:
        members: the alternatives that the setting allows, with references and unions resolved.
        fields: the settings of a group.
        choices: the groups of which one is chosen by its `name`.
        group: the only group allowed.
        items: an item of a list. values: a value of a mapping with free keys.
        types: the plain types allowed: integer, number, string, boolean.
    """

    spec: dict[str, Any]
    definitions: dict[str, Any]

    @cached_property
    def members(self) -> list[dict[str, Any]]:
        inner = self.spec.get("anyOf", [])
        if "$ref" in self.spec:
            inner = [self.definitions[self.spec["$ref"].rsplit("/", 1)[-1]]]
        return [member for spec in inner for member in self._node(spec).members] or [self.spec]

    @cached_property
    def fields(self) -> dict[str, "SchemaNode"]:
        return {key: self._node(spec) for key, spec in self.spec.get("properties", {}).items()}

    @cached_property
    def types(self) -> list[str]:
        found = [member.get("type") for member in self.members if not _constants(member)]
        # the other is a text as 200M
        names = [one[0] if isinstance(one, list) else one for one in found]
        return [
            one for one in names if one in TYPES and not (one == "integer" and "number" in names)
        ]

    @cached_property
    def literals(self) -> list:
        return [value for member in self.members for value in _constants(member)]

    @cached_property
    def null(self) -> bool:
        return {"type": "null"} in self.members

    @cached_property
    def choices(self) -> dict[str, "SchemaNode"]:
        return {name: self._node(member) for member in self.members for name in _tags(member)}

    @cached_property
    def group(self) -> "SchemaNode | None":
        return self._first(one for one in self.members if "properties" in one and not _tags(one))

    @cached_property
    def items(self) -> "SchemaNode | None":
        lists = (member for member in self.members if member.get("type") == "array")
        return self._first((one.get("prefixItems") or [one.get("items", {})])[0] for one in lists)

    @cached_property
    def values(self) -> "SchemaNode | None":
        free = (
            one for one in self.members if one.get("type") == "object" and "properties" not in one
        )
        values = (member.get("additionalProperties") for member in free)
        return self._first(one if isinstance(one, dict) else {} for one in values)

    @property
    def is_any(self) -> bool:
        return not all({"type", "const", "enum"} & member.keys() for member in self.members)

    @property
    def inside(self) -> "SchemaNode":
        """An item of a list or a value of a mapping; otherwise the setting itself."""
        return self.values or self.items or self

    @property
    def is_group_only(self) -> bool:
        """Whether only a mapping of settings is allowed."""
        return bool(self.group or self.choices) and not (self.types or self.literals or self.items)

    @property
    def description(self) -> str:
        return " ".join(self.spec.get("description", "").split())

    @property
    def may_change(self) -> bool:
        """Whether the setting may differ when a run is resumed."""
        return bool(self.spec.get("may_change"))

    @property
    def range(self) -> list[tuple[str, float]]:
        """The limits of a number, as keywords of JSON schema with their values."""
        specs = [self.spec, *(member for member in self.members if member is not self.spec)]
        return [(key, spec[key]) for spec in specs for key in LIMITS if key in spec]

    @property
    def range_text(self) -> str:
        """The limits as text, such as `at least 1 and at most 8`."""
        return " and ".join(f"{LIMITS[key][0]} {value:g}" for key, value in self.range)

    @property
    def type_text(self) -> str:
        """The types as text, such as `whole number`, `number or auto`, `list of whole number`."""
        found = [TYPES[name] for name in self.types]
        found += [str(one).lower() if isinstance(one, bool) else str(one) for one in self.literals]
        found += ["a choice by name"] if self.choices else []
        found += ["a group of settings"] if self.group else []
        found += [f"list of {self.items.type_text}"] if self.items else []
        found += [f"mapping to {self.values.type_text}"] if self.values else []
        found += ["null"] if self.null else []
        return " or ".join([", ".join(found[:-1]), found[-1]] if found[1:] else found) or "anything"

    def _node(self, spec: dict[str, Any]) -> "SchemaNode":
        return SchemaNode(spec, self.definitions)

    def _first(self, specs: Iterator[dict[str, Any]]) -> "SchemaNode | None":
        return next(map(self._node, specs), None)


def _constants(spec: dict[str, Any]) -> list:
    return [spec["const"]] if "const" in spec else spec.get("enum", [])


def _tags(member: dict[str, Any]) -> list:
    """The `name` of a choice."""
    return _constants(member.get("properties", {}).get("name", {}))


@lru_cache(maxsize=64)
def schema_of(cls: type[BaseModel]) -> SchemaNode:
    """The schema of a settings class.

    Raises TypeError where a class below `cls` has a field `name` that is not the tag of a choice: a mapping
    with a `name` replaces the one before it when files are merged.
    """
    schema = cls.model_json_schema(schema_generator=_Generator)
    definitions = schema.pop("$defs", {})
    for title, group in definitions.items():
        if "name" in (properties := group.get("properties", {})) and not _constants(
            properties["name"]
        ):
            raise TypeError(
                f"{title}.name: `name` is reserved for discriminated unions; rename this field"
            )
    return SchemaNode(schema, definitions)


@lru_cache(maxsize=8)
def read_schema(name: str) -> SchemaNode:
    """A committed schema: run, study, evaluation, tasks, attention or generation."""
    schema = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    del schema["properties"]["extends"]
    return SchemaNode(schema, schema.pop("$defs", {}))


def schema_text(cls: type[BaseModel]) -> str:
    """The schema of a settings class as the text of a file in configs/schema."""
    node = schema_of(cls)
    extends = {
        "description": "settings files, relative to this one, that this one overrides",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    properties = {"extends": extends} | node.spec["properties"]
    schema = node.spec | {"properties": properties, "$defs": node.definitions}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def walk(
    node: SchemaNode, prefix: str = "", above: tuple[int, ...] = ()
) -> Iterator[tuple[str, SchemaNode]]:
    """Every setting and every choice (as model.position.name=rope) below a group, default choices first.  A
    choice inside another choice of the same kind is not repeated."""
    for key, field in node.fields.items():
        name = f"{prefix}{key}"
        inner = field.inside
        if key == "name" and (field.literals or not prefix):
            continue
        yield name, field
        inside = f"{name}{'.KEY' if field.values else '[]' if field.items else ''}."
        first = (
            (field.spec.get("default") or {}).get("name")
            if inner.choices and inner is field
            else None
        )
        choices = sorted(inner.choices.items(), key=lambda item: item[0] != first)
        entered = (*above, *(id(choice.spec) for _, choice in choices))
        for choice, group in [("", inner.group), *choices]:
            if group is None or id(group.spec) in above:
                continue
            if choice:
                yield f"{inside}name={choice}", group
            yield from walk(group, inside, (*entered, id(group.spec)))


def leaves(node: SchemaNode) -> list[str]:
    """The dotted name of every setting below a group that an override can set."""
    names = (
        name
        for name, _ in walk(node)
        if "=" not in name and "[]" not in name and ".KEY" not in name
    )
    return list(dict.fromkeys(names))


def defaults(node: SchemaNode) -> dict[str, Any]:
    """The default of every setting that has one, as the lowest layer below files and overrides."""
    tree = {}
    for key, field in node.fields.items():
        if "default" in field.spec:
            tree[key] = field.spec["default"]
        elif field.group is not None and not field.null:
            tree[key] = defaults(field.group)
    return tree
