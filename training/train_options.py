"""The command line of train.py."""

import sys
from argparse import Namespace
from collections.abc import Sequence

from data.text_settings import with_text
from run_directory.run_settings import RunSettings
from settings.help import HelpTopics, SettingsParser

TOPICS = HelpTopics(
    classes=[RunSettings],
    common="train_length model.dim model.layers model.heads model.position data.source "
    "training.tokens training.batch_size training.micro_batch_size training.optimizer.lr",
    setting="model.position",
    choice="rope",
)


def parser_of(usage: str) -> SettingsParser:
    """The options of train.py."""
    parser = SettingsParser(usage, TOPICS)
    add = parser.add_argument
    add("overrides", nargs="*", default=[], metavar="CONFIG.yaml | key=value")
    add("--data", metavar="PATH", help="train on the text files of this folder, or on this file")
    add(
        "--run-dir",
        metavar="DIR",
        help="default: runs/<config>-<scheme>-<other choices>-<hash>",
    )
    add(
        "--fork",
        metavar="RUN",
        help="continue RUN from its newest checkpoint (or parent.checkpoint=STEP) in a new run "
        "directory, with its optimizer, step count and data order; settings default to those of "
        "RUN",
    )
    add(
        "--restart",
        action="store_true",
        help="train from step 0; the old directory is renamed",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check the data and estimate parameters, memory and time",
    )
    add(
        "--world",
        type=int,
        metavar="N",
        help="with --dry-run: size and memory on each of N GPUs",
    )
    add(
        "--force",
        action="store_true",
        help="train even if the estimated memory does not fit",
    )
    return parser


def parse_options(usage: str, arguments: Sequence[str] | None = None) -> Namespace:
    """The options of train.py, with --data PATH and --fork RUN as overrides. Raises
    TrainingError."""
    parser = parser_of(usage)
    options = parser.parse(arguments)
    options.command = ["train.py", *(sys.argv[1:] if arguments is None else arguments)]
    if options.world is not None and (not options.dry_run or options.world < 2):
        parser.error("--world is for --dry-run, and at least 2")
    if options.data:
        options.overrides = with_text(options.overrides, options.data)
    if options.fork:
        options.overrides += [f"parent.run={options.fork}", "parent.fork=true"]
    return options
