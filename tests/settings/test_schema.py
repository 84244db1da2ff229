"""The committed schemas match the classes, and every shipped settings file names its schema."""

import json
import re

import pytest

from scripts.docs.make_schema import CLASSES
from settings.load import SettingsLayers
from settings.schema import FOLDER, defaults, read_schema, schema_of, schema_text
from tests.settings.toy import Root

CONFIGS = FOLDER.parent
FILES = sorted(file for file in CONFIGS.rglob("*.yaml") if file.parent.name != "accelerate")
MODELINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)$", re.MULTILINE)


@pytest.mark.parametrize("name", CLASSES)
def test_committed_schemas_are_up_to_date(name):
    assert (FOLDER / f"{name}.json").read_text() == schema_text(CLASSES[name]), (
        "run scripts/docs/make_schema.py"
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_shipped_files_name_their_schema(file):
    if file.name == "methods.yaml":
        return  # method labels with overrides, not settings
    (path,) = MODELINE.findall(file.read_text())
    schema = file.parent / path
    assert schema.resolve().parent == FOLDER
    node = read_schema(schema.stem)
    layers = SettingsLayers(defaults(node))
    layers.apply([str(file)])
    layers.check(node)
    assert layers.problems == []


def test_files_may_be_partial_and_numbers_may_have_suffixes():
    schema = json.loads((FOLDER / "run.json").read_text())
    groups = [schema, *schema["$defs"].values()]
    assert not any("required" in group for group in groups) and "extends" in schema["properties"]
    assert all(group["additionalProperties"] is False for group in groups)
    tokens = schema["$defs"]["TrainingSettings"]["properties"]["tokens"]
    assert re.match(tokens["pattern"], "1.5M") and not re.match(tokens["pattern"], "1.5Q")
    assert tokens["type"] == ["integer", "string"] and tokens["minimum"] == 1


def test_defaults_are_those_of_the_class():
    assert defaults(schema_of(Root)) == Root().model_dump(mode="json")
    run = CLASSES["run"]
    assert defaults(schema_of(run)) == run().model_dump(mode="json")


def test_a_node_describes_its_field():
    model = schema_of(Root).fields["model"].group
    assert model is not None
    position = model.fields["position"]
    assert list(position.choices) == ["rope", "alibi", "pattern"] and position.group is None
    yarn = position.choices["rope"].fields["scaling"].choices["yarn"].fields["factor"]
    assert (yarn.types, yarn.literals, yarn.range) == (["number"], ["auto"], [("minimum", 1)])
    window = position.choices["rope"].fields["window"]
    assert (
        window.null and window.types == ["integer"] and window.type_text == "whole number or null"
    )
    kinds = position.choices["pattern"].fields["kinds"].values
    assert kinds is not None and list(kinds.choices) == ["rope", "alibi"]
    assert schema_of(Root).fields["training"].group.fields["interval"].may_change
