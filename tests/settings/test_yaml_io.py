"""Reading YAML: scalars, line numbers, error messages."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errors import ConfigError
from settings.yaml_io import parse_yaml, read_yaml, write_yaml


def test_scalars():
    for text, value in {
        "1e-3": 0.001, "2e6": 2000000.0, "-1.5E+2": -150.0, ".5": 0.5, "5.": 5.0, "0": 0, "-7": -7,
        "1_000": 1000, "true": True, "False": False, "null": None, "~": None, "": None,
        "'1e-3'": "1e-3", "[1, 2.0, a]": [1, 2.0, "a"], '[!!str 5, !!int "5", !!null ""]': ["5", 5, None],
    }.items():  # fmt: skip
        found, _ = parse_yaml(text, "word")
        assert found == value, text
        assert type(found) is type(value), text
    # 010 is neither eight nor ten: a leading zero is text, and then a clear error
    for text in [
        "010",
        "0x1F",
        "12:30",
        "on",
        "off",
        "no",
        "y",
        "none",
        "2024-01-31",
        "200M",
        "1e",
    ]:
        assert parse_yaml(text, "word")[0] == text


def test_lines_of_keys():
    _, lines = parse_yaml("a: 1\nb:\n  c: 2\n\n  d: [{e: 1}]\n", "f")
    assert lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "d"): 5,
        ("b", "d", 0, "e"): 5,
    }


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("a: 1\nb: 2\na: 3\n", ["f:3", "'a' is given twice", "first on line 1"]),
        ("a: [1\nb: 2\n", ["f:2", "not valid YAML"]),
        ("a: &x {b: *x}\n", ["f", "nested too deeply"]),
        ("? [a]\n: 1\n", ["f:1", "a key must be one word"]),
        ("a: !!python/name:os.system\n", ["f:1", "not valid YAML"]),
        ("a: \x1b[2J\n", ["f:1", r"'\x1b'"]),
        ('a: "\\0"\n', ["f:1", r"'\x00'"]),
        ('"\\ud800": 1\n', ["f:1", r"'\ud800'"]),
        ('a: "\\UFFFFFFFF"\n', ["f", "not valid YAML"]),
        ("a: !!bool maybe\n", ["f:1", "'maybe'"]),
        (f"a: {'9' * 5000}\n", ["f:1", "5000 digits"]),
        ("- " * 5000, ["f", "nested too deeply"]),
    ],
)
def test_errors_name_line(text, overrides):
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, "f")
    for word in overrides:
        assert word in str(error.value)


def test_invalid_files(tmp_path):
    for content, word in (
        (b"- 1\n", "a mapping"),
        (b"x\n", "a mapping"),
        (b"\xff\xfe", "UTF-8"),
    ):
        file = tmp_path / "f.yaml"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=word):
            read_yaml(file)
    file.write_bytes(b"# only a comment\n")
    assert read_yaml(file) == ({}, {})


leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**18), 10**18),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
    st.sampled_from(
        ["on", "no", "1e-3", "010", "1:30", "~", "null", "true", "1_0", "2020-01-01", "<<", "=", ""]
    ),
)
tree = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abon1", min_size=1), inner)
    ),
)


@given(st.dictionaries(st.sampled_from(["a", "no", "1", "null", "name"]), tree, max_size=4))
def test_dump_reloads_equal(value):
    found, _ = parse_yaml(write_yaml(value), "written")
    assert (found or {}) == value
    assert repr(found or {}) == repr(value)  # 1 is not 1.0 is not true


def test_infinities_and_nan_read_as_numbers():
    found, _ = parse_yaml("[.inf, -.inf, .nan]", "word")
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])
