"""Show the loss of each token of a text under two context-extension methods, on a page in the
browser.

    python scripts/serve.py RUN
    python scripts/serve.py RUN model.position.scaling.name=yarn --port 8001

RUN is a run directory, or a model of another project such as hf:FOLDER. Open http://127.0.0.1:8000:
the page colors the tokens of a text by their loss, side by side under two methods, with the loss by
position above. The server listens on the loopback interface only, handles one request at a time and
stops with Ctrl-C. Overrides of model.position change the positional scheme as in generate.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needs no installation

import sextant
from interop.loss_page import HOST, LossPage, make_server
from run_directory.console import Console
from settings.script import Parser, at_least, run_main


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "run",
        metavar="RUN",
        help="run directory, or hf:FOLDER",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="model.position.*"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port (8000); 0: any free port"
    )
    parser.add_argument(
        "--max-length",
        type=at_least(2),
        metavar="N",
        help="maximum tokens of a text (16 times the trained length)",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ... (auto: a GPU if available)"
    )
    args = parser.parse_args()
    if not 0 <= args.port <= 65535:
        parser.error(f"--port={args.port} must be 0 to 65535")
    console = Console()
    run = sextant.load(args.run, device=args.device, console=console)
    if run.changed:
        console.info(run.changed)
    page = LossPage(run, args.overrides, args.max_length)
    with make_server(page, args.port) as server:
        console.info(
            f"http://{HOST}:{server.server_port} shows {run.folder}; press Ctrl-C to stop it"
        )
        server.serve_forever()


if __name__ == "__main__":
    run_main(main)
