"""Command lines of train.py, evaluate.py, generate.py and study.py: options, help and misspelled settings.

`answer_quickly` runs before a script imports torch.  It prints help and reports misspelled options and
settings from the schemas in configs/schema.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

from errors import ConfigError
from settings.help import describe_setting, named_settings
from settings.load import SettingsLayers, is_override, setting_before_validation
from settings.schema import FOLDER, SchemaNode, defaults, read_schema
from settings.script import Parser, run_main
from settings.yaml_io import read_yaml

METHODS = FOLDER.parent / "evaluation" / "methods.yaml"
# schemas of evaluate.py, by protocol
EVALUATIONS = ("evaluation", "tasks", "attention", "generation")
SCHEMAS = {"train": ("run",), "evaluate": EVALUATIONS, "generate": ("run",), "study": ("study",)}
COMMON = {
    "train": (
        "train_length model.dim model.layers model.heads model.position data.source training.tokens "
        "training.batch_size training.micro_batch_size training.optimizer.lr"
    ),
    "evaluate": (
        "protocol lengths methods targets documents spans_per_document split bos contamination.check device"
    ),
    "generate": (
        "model.position.window model.position.sinks model.position.theta model.position.scaling "
        "model.position.remap model.position.temperature"
    ),
    "study": "base grid skip variants evaluations report.baseline report.primary report.lengths "
    "report.tolerance",
}
EXAMPLES = {
    "train": ("model.position", "rope"),
    "evaluate": ("contamination", "protocol"),
    "generate": ("model.position.scaling", "yarn"),
    "study": ("grid", "report"),
}


def parse(script: str, usage: str, arguments: Sequence[str] | None = None) -> Namespace:
    """The options of a script, from `arguments` or the command line.  Raises TrainingError."""
    parser = parser_of(script, usage)
    options = parser.parse_args(arguments)
    if options.help or (script == "evaluate" and not options.overrides):
        names = [options.run, *options.overrides] if script == "generate" else options.overrides
        print(help_page(script, usage, [name for name in names if name]), flush=True)
        sys.exit(0)
    if script == "generate":
        _check_generate(parser, options)
    if (
        script == "train"
        and options.world is not None
        and (not options.dry_run or options.world < 2)
    ):
        parser.error("--world is for --dry-run, and at least 2")
    if script == "train" and options.fork:
        options.overrides += [f"parent.run={options.fork}", "parent.fork=true"]
    return options


def parser_of(script: str, usage: str) -> Parser:
    """The command line of train, evaluate, generate or study."""
    parser = Parser(usage, add_help=False)
    _OPTIONS[script](parser.add_argument)
    example, _ = EXAMPLES[script]
    text = (
        f"this page; --help SETTING: one setting, e.g. --help {example}; --help all: every setting"
    )
    parser.add_argument("-h", "--help", action="store_true", help=text)
    return parser


def _train_options(add) -> None:
    add("overrides", nargs="*", default=[], metavar="CONFIG.yaml | key=value")
    add("--run-dir", metavar="DIR", help="default: runs/<config>-<scheme and other choices>-<hash>")
    add(
        "--fork",
        metavar="RUN",
        help="continue RUN from its newest checkpoint (or parent.checkpoint=STEP) in a new run directory, "
        "with its optimizer, step count and data order; settings default to those of RUN",
    )
    add(
        "--restart", action="store_true", help="train from step 0; the old run directory is renamed"
    )
    add(
        "--dry-run",
        action="store_true",
        help="check the data and estimate parameters, memory and time",
    )
    text = "with --dry-run: simulate N processes (GPUs) and count the communication of a step"
    add("--world", type=int, metavar="N", help=text)
    add("--force", action="store_true", help="train even if the estimated memory does not fit")


def _evaluate_options(add) -> None:
    add("overrides", nargs="*", default=[], metavar="RUN | CONFIG.yaml | key=value")
    add("--matrix", action="store_true", help="evaluate every method that the checkpoint supports")
    add(
        "--verbose",
        action="store_true",
        help="with --matrix: explain why the other methods do not apply",
    )
    add("--dry-run", action="store_true", help="list what is measured and estimate memory and time")


def _generate_options(add) -> None:
    add("run", nargs="?", metavar="RUN", help="run directory")
    add(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="model.position.*; - reads stdin",
    )
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be repeated",
    )
    add("--file", metavar="F", help='one prompt per line; .jsonl: objects with a "prompt"')
    add("--samples", type=int, default=1, metavar="N", help="samples per prompt (1)")
    add("--tokens", type=int, default=200, metavar="N", help="maximum number of new tokens (200)")
    add("--temperature", type=float, metavar="T", help="divides logits (0.8)")
    add("--greedy", action="store_true", help="same as --temperature 0")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens of total probability P",
    )
    add(
        "--min-p", type=float, metavar="P", help="drop tokens below P times the highest probability"
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1: penalize used tokens (1)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the first sample of each prompt (0)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be repeated",
    )
    add("--jsonl", action="store_true", help="print one JSON object per sample")
    add("--batch", type=int, default=8, metavar="N", help="batch size (8)")
    add("--no-cache", action="store_true", help="disable the KV cache (slow, for comparison)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (auto: a GPU if available)")
    add(
        "--weights",
        choices=["ema", "last"],
        help="default: ema if the run has an EMA, otherwise last",
    )
    add(
        "--dtype",
        choices=["float32", "float64", "bfloat16"],
        help="dtype of the weights (default: as stored)",
    )


def _check_generate(parser: Parser, options: Namespace) -> None:
    if options.run is None:
        parser.error("the following arguments are required: RUN")
    options.stdin = "-" in options.overrides
    options.overrides = [override for override in options.overrides if override != "-"]
    for override in options.overrides:
        if "=" not in override:
            parser.error(
                f"'{override}' is not an override; write KEY=VALUE, e.g. model.position.window=256"
            )
    if options.greedy and options.temperature:
        parser.error("argument --temperature: not allowed with argument --greedy")
    options.temperature = (
        0.0 if options.greedy else 0.8 if options.temperature is None else options.temperature
    )
    for name, minimum in (("samples", 1), ("tokens", 1), ("batch", 1), ("seed", 0)):
        if getattr(options, name) < minimum:
            parser.error(f"--{name} must be at least {minimum}, got {getattr(options, name)}")
    if options.seed + options.samples > 1 << 63:
        parser.error("--seed must be below 2**63")
    if "" in options.stop:
        parser.error("--stop must not be empty")


def _study_options(add) -> None:
    add("overrides", nargs="*", default=[], metavar="STUDY.yaml | key=value")
    add(
        "--run-dir",
        metavar="DIR",
        help="the study's directory (default: runs/studies/<name of the file>)",
    )
    add(
        "--jobs",
        type=int,
        metavar="N",
        help="cells to run at a time (default: one per GPU, or one)",
    )
    add("--only", metavar="PATTERN", help="run only the cells that match, e.g. 'scheme=rope,*'")
    add(
        "--no-training",
        action="store_true",
        help="evaluate trained cells and leave the others pending",
    )
    add(
        "--evaluate-again",
        action="store_true",
        help="rerun evaluate.py, which reuses its cached results",
    )
    add("--report", action="store_true", help="rewrite the report from results.json and exit")
    add("--dry-run", action="store_true", help="print the cells and the estimated time, and exit")
    add("--cell", type=int, metavar="INDEX", help="run one cell only, without gathering results")
    add("--slurm", action="store_true", help="write a SLURM array script with one task per cell")
    add("--partition", help="partition of the array script")
    text = "further sbatch option, as --sbatch=--time=2:00:00"
    add("--sbatch", action="append", default=[], metavar="OPTION", help=text)


_OPTIONS = {
    "train": _train_options,
    "evaluate": _evaluate_options,
    "generate": _generate_options,
    "study": _study_options,
}


def answer_quickly(usage: str | None) -> None:
    """Print help, or report misspelled options and settings, and exit; return if there is nothing to report.

    `usage` is the docstring of the script, which is found by its name in `sys.argv`.
    """
    script = Path(sys.argv[0]).stem
    try:
        check_settings(script, parse(script, usage or ""))
    except (ValueError, OSError) as error:
        problem = error

        def fail() -> None:
            raise problem

        run_main(fail)  # prints the error in the format of every script


def check_settings(script: str, options: Namespace) -> None:
    """Raise ConfigError for misspelled settings, wrong types and numbers out of range.

    Settings of another run are the base of an extension run, and of generate.py.
    """
    arguments = options.overrides
    schema = read_schema(SCHEMAS[script][0])
    base = None
    if script == "evaluate":
        given = [one for one in arguments if not Path(one).is_dir()]  # directories are runs
        arguments = [one for one in given if one.endswith((".yaml", ".yml")) or is_override(one)]
        schema = _evaluation_schema(setting_before_validation(arguments, "protocol"))
    elif script == "generate":
        base = options.run
    elif script == "train":
        parent = setting_before_validation(arguments, "parent")
        base = parent.get("run", "") if isinstance(parent, dict) else parent
    merged = SettingsLayers(defaults(schema))
    if base is not None:
        file = Path(str(base)) / "settings.yaml"
        if not file.is_file():
            return  # reported where the run is opened
        merged.apply_file(file)
        if script == "generate" and merged.tree["model"]["position"].get("name") == "pattern":
            return  # overrides apply to every layer kind that has the setting
    merged.apply(arguments)
    merged.check(schema)
    merged.raise_problems()


def _evaluation_schema(protocol: object) -> SchemaNode:
    every = [read_schema(name) for name in EVALUATIONS]
    schemas = {
        protocol: schema for schema in every for protocol in schema.fields["protocol"].literals
    }
    if protocol is not None and str(protocol) not in schemas:
        raise ConfigError(f"protocol={protocol} is unknown; known: {', '.join(schemas)}")
    return every[0] if protocol is None else schemas[str(protocol)]


def help_page(script: str, usage: str, arguments: Iterable[str]) -> str:
    """Help for the settings that `arguments` name; without any, the usage and the most common settings."""
    schemas = [read_schema(name) for name in SCHEMAS[script]]
    if names := named_settings(schemas, arguments):
        return "\n\n".join(describe_setting(schemas, name) for name in names)
    common = "\n".join(
        describe_setting(schemas[:1], name, inside=False) for name in COMMON[script].split()
    )
    example, choice = EXAMPLES[script]
    return (
        f"{parser_of(script, usage).format_help()}\ncommon settings:\n\n{common}\n\n"
        f"--help {example}: a setting and its choices; --help {choice}: one; --help all: every setting."
        + (
            f"\n\nmethods: {', '.join(read_yaml(METHODS)[0])}, or your own"
            if script == "evaluate"
            else ""
        )
    )
