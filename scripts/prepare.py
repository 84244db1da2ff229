"""Prepare text for training: read it, train a tokenizer, write token shards.

    python scripts/prepare.py configs/data/stdlib.yaml
    python scripts/prepare.py --data texts data.tokenizer.vocab_size=8192
    python scripts/prepare.py configs/small.yaml --data book.txt

train.py prepares text as well; use this script to do so beforehand, or for text that is only
evaluated. An interrupted preparation resumes where it stopped. The last line on standard output is
the prepared folder; its prepared.json has the numbers of the tables.
"""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needs no installation

from data import DataError, DataSettings, PreparedData, prepared_folder
from data.preparation.preparation import prepare
from data.preparation.summary import show
from data.task_data import generated
from data.text_settings import with_text
from run_directory.console import Console
from run_directory.run_settings import RunSettings
from settings.help import describe_setting
from settings.load import load_settings
from settings.script import Parser, at_least, run_main


def parse() -> Namespace:
    parser = Parser(__doc__, add_help=False)
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="FILE.yaml | key.inner=value",
    )
    parser.add_argument(
        "--data", metavar="PATH", help="read the text files of this folder, or this file"
    )
    parser.add_argument(
        "--workers",
        type=at_least(1),
        metavar="N",
        help="threads that tokenize; default: one per core",
    )
    parser.add_argument(
        "-h", "--help", action="store_true", help="print this text and every setting of data"
    )
    options = parser.parse_args()
    if options.data:
        options.overrides = with_text(options.overrides, options.data)
    if options.help:
        print(parser.format_help())
        print("settings of data (write data.KEY=value):\n")
        print(describe_setting([DataSettings], "all"))
        sys.exit(0)
    return options


def main() -> None:
    options = parse()
    console = Console()
    settings = load_settings(RunSettings, options.overrides)
    if generated(settings.data):
        raise DataError("data.source.name=symbols: items are generated in training; train on them")
    old = (prepared_folder(settings.data) / "prepared.json").is_file()
    prepared = prepare(settings.data, console, workers=options.workers)
    assert isinstance(prepared, PreparedData)
    if old:  # for a new folder, prepare() has printed the tables
        show(prepared.summary, console)
    print(prepared.folder)


if __name__ == "__main__":
    run_main(main)
