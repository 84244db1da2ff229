"""Command lines of scripts with settings: options, overrides and `--help SETTING`."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from settings.accepted import leaves
from settings.help import describe_setting, named_settings
from settings.messages import nearest_setting
from settings.script import Parser


@dataclass(frozen=True)
class HelpTopics:
    """What `--help` shows besides the usage and the options.

    Attributes:
        classes: the settings of the script.
        common: names of the most common settings.
        setting, choice: examples of `--help SETTING`.
        note: further text, at the end.
    """

    classes: Sequence[type[BaseModel]]
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
        self, arguments: Sequence[str] | None = None, needs_arguments: bool = False
    ) -> Namespace:
        """The options, from `arguments` or the command line. Prints help and exits if it is
        requested, or with `needs_arguments` if there are none."""
        arguments = sys.argv[1:] if arguments is None else arguments
        options = self.parse_args(arguments)
        if options.help or (needs_arguments and not arguments):
            print(self.help_page(arguments), flush=True)
            sys.exit(0)
        return options

    def advice(self, unknown: str) -> str:
        if option := super().advice(unknown):
            return option
        known = [name for cls in self.topics.classes for name in leaves(cls)]
        key = unknown.replace("-", "_")
        meant = nearest_setting(key, known)
        return f"did you mean the setting {meant}=VALUE? " if meant else ""

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
            f"\n--help {topics.setting}: a setting and its choices; --help {topics.choice}: one; "
            "--help all: every setting.",
        ]
        if topics.note:
            parts.append(f"\n{topics.note}")
        return "\n".join(parts)
