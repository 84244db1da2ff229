"""Serve a run on this machine: an OpenAI-compatible completions API, and a page to look at the model.

    python scripts/serve.py RUN
    python scripts/serve.py RUN model.position.scaling.name=yarn --port 8001

RUN is a run directory, or a model of another project such as hf:FOLDER. Overrides of model.position change
the positional scheme as in generate.py. Open http://127.0.0.1:8000 for the page: it streams text, coloured by
the loss of each token, under any context-extension method that applies to the run. /v1/models lists the
methods as models: NAME, NAME:yarn, ... The server listens on the loopback interface only and stops with
Ctrl-C. Requires the extra `serve`.
"""

import importlib
import sys
from pathlib import Path

# when run as a script, from any directory
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from interop.extras import load_extra
from interop.runs import run_of
from model import find_device
from settings.script import Parser, run_main
from training.logging.console import Console
from training.run.directory import load


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("run", metavar="RUN", help="run directory, or hf:FOLDER")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="model.position.*"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port (8000); 0: any free port"
    )
    parser.add_argument(
        "--batch", type=int, default=32, metavar="N", help="rows generated at a time (32)"
    )
    parser.add_argument(
        "--queue", type=int, default=256, metavar="N", help="rows that may wait (256)"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="maximum tokens of prompt and completion (16 times the trained length)",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ... (auto: a GPU if available)"
    )
    args = parser.parse_args()
    for name, least in (("port", 0), ("batch", 1), ("queue", 0), ("max_length", 2)):
        value = getattr(args, name)
        if value is not None and (value < least or (name == "port" and value > 65535)):
            parser.error(f"--{name.replace('_', '-')}={value} is out of range")
    for package in ("starlette", "uvicorn"):
        load_extra(package, "serve")
    server = importlib.import_module("interop.server.serving")
    console = Console()
    loaded = load(run_of(args.run), (), find_device(args.device), console=console)
    if loaded.changed:
        console.info(loaded.changed)
    served = server.ServedRun(loaded, args.overrides, args.max_length)
    server.serve(served, server.Limits(rows=args.batch, queue=args.queue), args.port, console)


if __name__ == "__main__":
    run_main(main)
