"""Export a run to a Hugging Face folder.

  python scripts/export_model.py runs/quickstart --out quickstart-hf

A model that a class of transformers represents exactly is exported without code; other models with
one generated modeling file, which is loaded with trust_remote_code=True. Logits of the export in
transformers are compared with the run's logits at 1, 4 and 16 times the trained length; an export
whose logits differ is not written. Requires the extra `interop`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needs no installation

import sextant
from interop.export.export_folder import DTYPES, export_folder
from interop.export.parity import MULTIPLES
from interop.extras import load_extra
from interop.new_folder import check_new
from run_directory.console import Console
from settings.script import Parser, run_main


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "run",
        metavar="RUN",
        help="run directory or hf:FOLDER",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="overrides of the positional scheme",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="the new folder",
    )
    parser.add_argument(
        "--step",
        type=int,
        help="step of the checkpoint; default: the newest",
    )
    parser.add_argument(
        "--weights", choices=("last", "ema"), help="default: ema if the run has EMA weights"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights")
    parser.add_argument(
        "--multiples",
        type=int,
        nargs="+",
        default=MULTIPLES,
        metavar="N",
        help="multiples of the trained length at which logits are compared; default: 1 4 16",
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="use the format of released models whose class transformers lacks (Canon); "
        "logits are not compared",
    )
    args = parser.parse_args()
    load_extra("transformers")  # fail before the run is loaded
    check_new(args.out)
    console = Console()
    run = sextant.load(
        args.run,
        *args.overrides,
        device="cpu",
        checkpoint=args.step,
        weights=args.weights,
        console=console,
    )
    choice = export_folder(
        run,
        args.out,
        dtype=args.dtype,
        multiples=args.multiples,
        published=args.published,
        console=console,
    )
    name = choice.model_type or f"a generated modeling file ({choice.reason})"
    console.info(f"{args.out}: step {run.step}, {run.weights} weights, {name}")


if __name__ == "__main__":
    run_main(main)
