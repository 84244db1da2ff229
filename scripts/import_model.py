"""Convert a model of another codebase to a run directory.

  python scripts/import_model.py hf:HuggingFaceTB/SmolLM2-135M --out runs/smollm2
  python scripts/import_model.py hf:FOLDER --tokenizer tokenizer.model --out runs/NAME

The model is a Hugging Face folder or a name on its hub. evaluate.py, generate.py and parent.run
accept the same names and convert the model to runs/imported/ themselves; this script chooses
another folder, or a tokenizer that is not part of the checkpoint. No pickle is read and no code of
the checkpoint is run. Models whose results would differ from transformers are rejected.
docs/interop.md shows how transformers converts a GGUF file to such a folder.
"""

import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needs no installation

from interop.imported_runs import find_foreign_checkpoint, imported_folder, write_run
from interop.new_folder import check_new
from run_directory.console import Console
from settings.script import Parser, run_main


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "model", metavar="MODEL", help="hf:FOLDER, or hf:NAME of the Hugging Face hub"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json or tokenizer.model; default: the checkpoint's own",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="RUN",
        help="run directory to create; default: in runs/imported/",
    )
    args = parser.parse_args()
    if args.out is not None:
        check_new(args.out)
    checkpoint = find_foreign_checkpoint(args.model)
    run = args.out or imported_folder(checkpoint)
    tokenizer = Path(args.tokenizer) if args.tokenizer else None
    model = write_run(checkpoint, run, tokenizer).model
    console = Console()
    console.info(
        f"{run}: {model.parameter_count():,} parameters, trained length {model.train_length}"
    )
    console.info(f'next: python generate.py {shlex.quote(str(run))} --prompt "Once upon a time"')


if __name__ == "__main__":
    run_main(main)
