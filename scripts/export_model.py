"""Export a run to a Hugging Face folder, a GGUF file for llama.cpp, or one safetensors file.

  python scripts/export_model.py runs/quickstart --out quickstart-hf
  python scripts/export_model.py runs/quickstart --format gguf --out quickstart.gguf --dtype q8_0
  python scripts/export_model.py runs/quickstart --format safetensors --out weights.safetensors

Hugging Face: a model that a class of transformers represents exactly is exported without code; any other one
with one generated modeling file, which is loaded with trust_remote_code=True. GGUF: a model that no
architecture of llama.cpp computes is refused with the reason. safetensors: the weights of a checkpoint,
sharded or not, under the names of Sextant's parameters; needs no extra.

Logits of the export in transformers, or in llama.cpp where llama-cpp-python is installed, are compared with
those of the run at 1, 4 and 16 times the trained length. An export whose logits differ is not written.
Requires the extra `interop`.
"""

from pathlib import Path

from interop.export.folder import DTYPES, export_folder
from interop.export.parity import MULTIPLES
from interop.export.weights import export_weights
from interop.extras import load_extra
from interop.gguf.export import export_gguf
from interop.runs import run_of
from settings.script import Parser, run_main
from training.logging.console import Console
from training.run.directory import load

# format -> package that it requires
EXTRAS = {"hf": "transformers", "gguf": "gguf", "safetensors": None}
GGUF_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("run", metavar="RUN", help="run directory, hf:FOLDER or gguf:FILE")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of the positional scheme")
    parser.add_argument("--format", choices=EXTRAS, default="hf", help="default: hf")
    parser.add_argument("--out", type=Path, required=True, help="the new folder or file")
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest good one")
    parser.add_argument(
        "--weights", choices=("last", "ema"), help="default: ema if the run has EMA weights"
    )
    parser.add_argument(
        "--dtype",
        choices=GGUF_TYPES,
        default="float32",
        help="of the stored weights; q8_0: GGUF only",
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
    if args.format == "hf" and args.dtype not in DTYPES:
        parser.error(f"argument --dtype: {args.dtype} requires --format gguf")
    if args.format == "safetensors" and (args.dtype, args.multiples) != ("float32", MULTIPLES):
        parser.error("arguments --dtype and --multiples require --format hf or gguf")
    if extra := EXTRAS[args.format]:
        load_extra(extra)  # before the run is loaded
    console = Console()
    run = load(
        run_of(args.run),
        args.overrides,
        checkpoint=args.step,
        weights=args.weights,
        console=console,
    )
    options = {"multiples": args.multiples, "console": console}
    if args.format == "safetensors":
        count = export_weights(run, args.out)
        about = f"{args.out}: step {run.step}, {run.weights} weights, {count} tensors"
        console.info(f"{about}, {args.out.stat().st_size / 1e6:,.1f} MB")
    elif args.format == "gguf":
        file = export_gguf(run, args.out, dtype=GGUF_TYPES[args.dtype], **options)
        about = (
            f"{file.path}: step {run.step}, {run.weights} weights, architecture {file.architecture}"
        )
        console.info(f"{about}, {file.path.stat().st_size / 1e6:,.1f} MB")
    else:
        folder = export_folder(run, args.out, dtype=args.dtype, **options)
        name = folder.choice.model_type or "a generated modeling file"
        about = f"{folder.folder}: step {run.step}, {run.weights} weights"
        console.info(f"{about}, {name} ({folder.choice.reason})")


if __name__ == "__main__":
    run_main(main)
