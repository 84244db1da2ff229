"""Export a run to a Hugging Face folder.

  python scripts/export_model.py runs/quickstart --out quickstart-hf

A model that a class of transformers represents exactly is exported without code; any other one with one
generated modeling file, which is loaded with trust_remote_code=True. The logits of the exported folder in
transformers are compared with ours at 1, 4 and 16 times the trained length; a folder whose logits differ is
not written. Requires the extra `interop`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script, from any directory

from interop.export.folder import DTYPES, export_folder
from interop.export.parity import MULTIPLES
from interop.extras import load_extra
from training.logging.console import Console
from training.run.directory import load
from training.script import Parser, run_main


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of the positional scheme")
    parser.add_argument("--out", type=Path, required=True, help="the new folder")
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest good one")
    parser.add_argument("--weights", choices=("last", "ema"), help="default: ema if the run has EMA weights")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the stored weights")
    parser.add_argument(
        "--multiples",
        type=int,
        nargs="+",
        default=MULTIPLES,
        metavar="N",
        help="multiples of the trained length at which logits are compared; default: 1 4 16",
    )
    args = parser.parse_args()
    load_extra("transformers")  # before the run is loaded
    console = Console()
    run = load(args.run, args.overrides, checkpoint=args.step, weights=args.weights, console=console)
    done = export_folder(run, args.out, dtype=args.dtype, multiples=args.multiples, console=console)
    name = done.choice.model_type or "a generated modeling file"
    console.info(f"{done.folder}: step {run.step}, {name} ({done.choice.reason})")


if __name__ == "__main__":
    run_main(main)
