"""Export a run to a GGUF file for llama.cpp.

  python scripts/export_gguf.py runs/quickstart --out quickstart.gguf
  python scripts/export_gguf.py runs/quickstart --out quickstart.gguf --dtype Q8_0

Runs that no architecture of llama.cpp computes are refused with the reason. Where llama-cpp-python is
installed, its logits are compared with ours at 1, 4 and 16 times the trained length; a file whose logits
differ is not written. Requires the extra `interop`.
"""

import sys
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script, from any directory

from interop.extras import load_extra
from interop.gguf.export import MULTIPLES, export_gguf
from interop.gguf.writing.writer import StorageType
from training.logging.console import Console
from training.run.directory import load
from training.script import Parser, run_main


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of the positional scheme")
    parser.add_argument("--out", type=Path, required=True, help="the new file")
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest good one")
    parser.add_argument("--weights", choices=("last", "ema"), help="default: ema if the run has EMA weights")
    parser.add_argument(
        "--dtype", choices=get_args(StorageType), default="F32", help="of matrices; default: F32"
    )
    parser.add_argument(
        "--multiples",
        type=int,
        nargs="+",
        default=MULTIPLES,
        metavar="N",
        help="multiples of the trained length at which logits are compared; default: 1 4 16",
    )
    args = parser.parse_args()
    load_extra("gguf")  # before the run is loaded
    console = Console()
    run = load(args.run, args.overrides, checkpoint=args.step, weights=args.weights, console=console)
    done = export_gguf(run, args.out, dtype=args.dtype, multiples=args.multiples, console=console)
    size = done.path.stat().st_size / 1e6
    console.info(f"{done.path}: step {run.step}, architecture {done.architecture}, {size:,.1f} MB")


if __name__ == "__main__":
    run_main(main)
