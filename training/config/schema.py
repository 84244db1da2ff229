"""Settings as a JSON schema: what may be set, with which type, limits, default and description.

`schema_of` generates the schema of a pydantic class.  scripts/make_schema.py writes the schemas to
configs/schema, where editors and the command line read them without importing the classes and torch.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "schema"
SUFFIXED = r"^([-+]?[0-9][0-9_]*(?:\.[0-9]+)?|[-+]?\.[0-9]+)\s?([kKMBGT])$"  # 200M, 1.5B
_LIMITS = {
    "exclusiveMinimum": "greater than",
    "minimum": "at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}
# pydantic writes limits of a union under its own names.
_PYDANTIC_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}


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
        return factory()

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
    """One setting, one group of settings or one choice of a kind, with the definitions it refers to."""

    spec: dict[str, Any]
    definitions: dict[str, Any]

    @cached_property
    def members(self) -> list[dict[str, Any]]:
        """The alternatives this setting allows, with references and unions resolved."""

        def resolve(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
            if "$ref" in spec:
                yield from resolve(self.definitions[spec["$ref"].rsplit("/", 1)[-1]])
            elif "anyOf" in spec:
                for member in spec["anyOf"]:
                    yield from resolve(member)
            else:
                yield spec

        return list(resolve(self.spec))

    @cached_property
    def fields(self) -> dict[str, "SchemaNode"]:
        """The settings of a group."""
        return {key: self._node(spec) for key, spec in self.spec.get("properties", {}).items()}

    @cached_property
    def types(self) -> list[str]:
        """The plain types allowed: integer, number, string, boolean."""
        found = []
        for member in self.members:
            names = member.get("type", [])
            names = [names] if isinstance(names, str) else names
            if "const" not in member and "enum" not in member:
                suffixed = member.get("pattern") == SUFFIXED
                found += [name for name in names if name in _TYPES and not (suffixed and name == "string")]
        return [name for name in found if not (name == "integer" and "number" in found)]

    @cached_property
    def literals(self) -> list:
        return [value for member in self.members for value in _constants(member)]

    @cached_property
    def null(self) -> bool:
        return {"type": "null"} in self.members

    @cached_property
    def choices(self) -> dict[str, "SchemaNode"]:
        """The groups of which one is chosen by its `name`."""
        return {
            name: self._node(member)
            for member in self.members
            for name in _constants(member.get("properties", {}).get("name", {}))
        }

    @cached_property
    def group(self) -> "SchemaNode | None":
        """The only group allowed."""
        for member in self.members:
            if "properties" in member and not _constants(member["properties"].get("name", {})):
                return self._node(member)
        return None

    @cached_property
    def items(self) -> "SchemaNode | None":
        """An item of a list."""
        for member in self.members:
            if member.get("type") == "array":
                return self._node((member.get("prefixItems") or [member.get("items", {})])[0])
        return None

    @cached_property
    def values(self) -> "SchemaNode | None":
        """A value of a mapping with free keys."""
        for member in self.members:
            if member.get("type") == "object" and "properties" not in member:
                values = member.get("additionalProperties", {})
                return self._node(values if isinstance(values, dict) else {})
        return None

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
        return [(key, spec[key]) for spec in specs for key in _LIMITS if key in spec]

    @property
    def range_text(self) -> str:
        """The limits in words, such as `at least 1 and at most 8`."""
        return " and ".join(f"{_LIMITS[key]} {value:g}" for key, value in self.range)

    @property
    def type_text(self) -> str:
        """The types in words, such as `whole number`, `number or auto`, `list of whole numbers`."""
        found = [_TYPES[name] for name in self.types]
        found += [str(one).lower() if isinstance(one, bool) else str(one) for one in self.literals]
        found += ["a choice by name"] if self.choices else []
        found += ["a group of settings"] if self.group else []
        if self.items is not None:
            item = self.items.type_text
            plurals = {"whole number": "whole numbers", "a group of settings": "groups of settings"}
            found.append("list of " + plurals.get(item, "numbers" if item == "number" else item))
        found += [f"mapping to {self.values.type_text}"] if self.values is not None else []
        found += ["null"] if self.null else []
        return ", ".join(found[:-1]) + (" or " if found[1:] else "") + found[-1] if found else "anything"

    def _node(self, spec: dict[str, Any]) -> "SchemaNode":
        return SchemaNode(spec, self.definitions)


def _constants(spec: dict[str, Any]) -> list:
    return [spec["const"]] if "const" in spec else spec.get("enum", [])


@lru_cache(maxsize=64)
def schema_of(cls: type[BaseModel]) -> SchemaNode:
    """The schema of a settings class.

    Raises TypeError where a class below `cls` has a field `name` that is not the tag of a choice: a mapping
    with a `name` replaces the one before it when files are merged.
    """
    schema = cls.model_json_schema(schema_generator=_Generator)
    definitions = schema.pop("$defs", {})
    for title, group in definitions.items():
        if "name" in (properties := group.get("properties", {})) and not _constants(properties["name"]):
            raise TypeError(f"{title}.name: `name` is reserved for choices of a kind; rename this field")
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


def leaves(node: SchemaNode, prefix: str = "", above: tuple[int, ...] = ()) -> Iterator[str]:
    """Every dotted name below a group, through all choices; a group inside itself is entered once."""
    if id(node.spec) in above:
        return
    for key, field in node.fields.items():
        yield f"{prefix}{key}"
        for inner in ([field.group] if field.group else []) + list(field.choices.values()):
            yield from leaves(inner, f"{prefix}{key}.", (*above, id(node.spec)))


def defaults(node: SchemaNode) -> dict[str, Any]:
    """The default of every setting that has one, as the lowest layer below files and overrides."""
    tree = {}
    for key, field in node.fields.items():
        if "default" in field.spec:
            tree[key] = field.spec["default"]
        elif field.group is not None and not field.null:
            tree[key] = defaults(field.group)
    return tree
