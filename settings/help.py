"""Help on settings, from their classes, and the command lines of scripts that have settings."""

import difflib
import re
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from errors import ConfigError
from settings.fields import Accepted, accepted, default_of, is_marked, leaves, show, walk
from settings.messages import nearest
from settings.script import Parser

WIDTH = 100  # characters of a page
COLUMN = 40  # where descriptions begin
SettingsClasses = Sequence[type[BaseModel]]
Entry = tuple[str, type[BaseModel], str | None]  # an item of `walk`


@dataclass(frozen=True)
class HelpTopics:
    """What `--help` shows besides the usage and the options.

    Attributes:
        classes: the settings of the script.
        common: names of the most common settings.
        setting, choice: examples of `--help SETTING`.
        note: further text, at the end.
    """

    classes: SettingsClasses
    common: str
    setting: str
    choice: str
    note: str = ""


class SettingsParser(Parser):
    """Parser of a script whose arguments include settings: `--help SETTING` describes one of
    them."""

    def __init__(self, usage: str | None, topics: HelpTopics):
        super().__init__(usage, add_help=False)
        self.topics = topics
        self.add_argument(
            "-h",
            "--help",
            action="store_true",
            help=f"this page; --help SETTING: one setting, e.g. --help {topics.setting}; --help "
            "all: every setting",
        )

    def parse(
        self,
        arguments: Sequence[str] | None = None,
        needs_arguments: bool = False,
    ) -> Namespace:
        """The options, from `arguments` or the command line. Prints help and exits if help is
        requested, or if `needs_arguments` and there are no arguments."""
        arguments = sys.argv[1:] if arguments is None else arguments
        options = self.parse_args(arguments)
        if options.help or (needs_arguments and not arguments):
            print(self.help_page(arguments), flush=True)
            sys.exit(0)
        return options

    def advice(self, unknown: str) -> str:
        known = [name for cls in self.topics.classes for name in leaves(cls)]
        meant = nearest(unknown.replace("-", "_"), known, cutoff=0.9)
        return super().advice(unknown) or (meant and f"did you mean the setting {meant}=VALUE? ")

    def help_page(self, arguments: Sequence[str]) -> str:
        """Help for the settings among `arguments`; without any, the usage and the most common
        settings."""
        topics = self.topics
        if names := named_settings(topics.classes, arguments):
            return "\n\n".join(describe_setting(topics.classes, name) for name in names)
        common = [
            describe_setting(topics.classes[:1], name, inside=False)
            for name in topics.common.split()
        ]
        parts = [
            self.format_help(),
            "common settings:\n",
            "\n".join(common),
            f"\n--help {topics.setting}: a setting and its choices; --help {topics.choice}: one "
            "choice; --help all: every setting.",
            f"\n{topics.note}" if topics.note else "",
        ]
        return "\n".join(parts).rstrip()


def named_settings(classes: SettingsClasses, arguments: Iterable[str]) -> list[str]:
    """The arguments that name settings, without overrides, files and directories."""
    known = {name for cls in classes for name in leaves(cls)}
    names = [text for text in arguments if re.fullmatch(r"[A-Za-z_][\w.]*(\.name=\w+)?", text)]
    return [name for name in names if name in known or not Path(name).exists()]


def describe_setting(
    classes: SettingsClasses,
    word: str,
    inside: bool = True,
) -> str:
    """Help for one setting, group of settings or choice, named by its path or its last key; `all`
    for every setting. `inside`: include the settings and choices inside it. Raises ConfigError if
    there is no such setting."""
    entries = [entry for root in classes for entry in walk(root)]
    first = {entry[0]: entry for entry in reversed(entries)}
    names = list(dict.fromkeys(entry[0] for entry in entries))
    shown = entries if word == "all" else []
    for name in _matches(names, word)[: None if inside else 1]:
        shown += [first[name], *(_inside(*first[name], entries) if inside else ())]
    if not shown:
        close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
        guess = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"--help {word}: no such setting{guess}")
    texts = dict.fromkeys(_entry(*entry) for entry in shown)
    if inside and any(text.split()[0].endswith("*") for text in texts):
        texts["\n* may change when a run is resumed"] = None
    return "\n".join(texts)


def _matches(names: list[str], word: str) -> list[str]:
    """The settings and choices that a path such as model.position.rope names, or a last part such
    as rope."""
    word = word.replace(".name=", ".").removesuffix(".name")
    by_path = {name.replace(".name=", "."): name for name in names}
    if word in by_path:
        return [by_path[word]]
    ends = [name for path, name in by_path.items() if path.endswith(f".{word}")]
    return [name for name in ends if ".name=" in name] or ends


def _inside(name: str, cls: type[BaseModel], key: str | None, entries: list[Entry]) -> list[Entry]:
    """The settings of a group or choice, or the choices of a setting."""
    accepts = accepted(cls, key).inside if key else Accepted(group=cls)
    prefix = re.escape(name.partition(".name=")[0]) + r"(\[\]|\.KEY)?\."
    choices = re.compile(f"{prefix}name=")
    settings = re.compile(rf"{prefix}\w+")
    return [
        (name, cls, key)
        for name, cls, key in dict.fromkeys(entries)
        if (choices.match(name) and cls in accepts.choices.values() and key is None)
        or (settings.fullmatch(name) and cls is accepts.group)
    ]


def _entry(name: str, cls: type[BaseModel], key: str | None) -> str:
    """`name  description (type, limits, default)`, in two columns."""
    text = _summary(cls) if key is None else _description(cls, key)
    if key is not None and is_marked(cls.model_fields[key], "may_change"):
        name += "*"
    indent = " " * COLUMN
    first = f"{name:<{COLUMN}}" if len(name) + 2 <= COLUMN else f"{name}\n{indent}"
    lines = textwrap.wrap(text, WIDTH - COLUMN)
    return (first + f"\n{indent}".join(lines)).rstrip()


def _description(cls: type[BaseModel], key: str) -> str:
    field = cls.model_fields[key]
    accepts = accepted(cls, key)
    details = []
    if accepts.choices:
        details.append(f"one of {', '.join(accepts.choices)}")
    elif not accepts.group:
        details.append(accepts.type_text)
    details = [textwrap.shorten(text, 100, placeholder=" ...") for text in details]
    details += accepts.limits
    default = None if field.is_required() else default_of(field)
    if isinstance(default, float):
        details.append(f"default {default:g}")
    elif accepts.choices and (name := getattr(default, "name", None)) is not None:
        details.append(f"default {name}")
    elif not field.is_required() and not isinstance(default, (BaseModel, dict)):
        value = list(default) if isinstance(default, tuple) else default
        details.append(f"default {show(value, 1000)}")
    text = " ".join((field.description or "").split())
    text = re.sub(r"(?<!\.)\.$", "", text)  # but not of an ellipsis
    return f"{text} ({', '.join(details)})" if details else text


def _summary(cls: type[BaseModel]) -> str:
    """The first sentence of the docstring of a group or choice."""
    text = " ".join((cls.__doc__ or "").split())
    return re.split(r"(?<!al)\. ", text)[0].rstrip(".")
