"""Convert a Hugging Face Llama to a run directory for generate.py and evaluate.py.

  python scripts/import_hf.py HF_FOLDER --tokenizer tokenizer.model --out runs/NAME

HF_FOLDER contains config.json and model.safetensors (or shards with their index). No pickle is loaded, no
code of the folder is run and nothing is downloaded. Models that would compute something other than in
transformers are rejected.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script, from any directory

from data.settings import DataSettings
from data.tokenizers import Tokenizer, load_tokenizer_file
from data.tokenizers.settings import SentencePieceSettings
from interop import ImportedModel, InteropError, build_model, read_folder
from training.checkpoint.storage import save_checkpoint
from training.config.settings import RunSettings, TrainingSettings
from training.config.trainer_settings import ValidationSettings
from training.logging.console import Console
from training.run.directory import create_run, is_run
from training.script import Parser, run_main


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("folder", metavar="HF_FOLDER", help="folder with config.json and safetensors")
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="the model's sentencepiece model")
    parser.add_argument(
        "--out", metavar="RUN", help="run directory to create; default: runs/<name of HF_FOLDER>"
    )
    args = parser.parse_args()
    out = Path(args.out or Path("runs") / Path(args.folder).resolve().name)
    run, model = import_folder(Path(args.folder), Path(args.tokenizer), out)
    console = Console()
    console.info(f"{run}: {model.parameter_count():,} parameters, trained length {model.train_length}")
    console.info(f'next: python generate.py {run} --prompt "Once upon a time"')


def import_folder(folder: Path, tokenizer_file: Path, out: Path):
    """Returns the run directory and its model. Raises InteropError, DataError, TrainingError."""
    foreign = build_model(read_folder(folder))
    tokenizer = load_tokenizer_file(tokenizer_file)
    _check_tokenizer(tokenizer, tokenizer_file, foreign)
    if is_run(out):
        raise InteropError(f"{out} is already a run; choose another --out")
    source = {"imported_from": [str(path) for path in foreign.checkpoint.files]}
    about = source | {"vocab_size": foreign.model.vocab_size}
    create_run(out, _settings(foreign, tokenizer_file), tokenizer, sys.argv, about)
    # last, since checkpoints without a manifest are rejected
    save_checkpoint(out, 0, foreign.model, state=source)
    return out, foreign.model


def _check_tokenizer(tokenizer: Tokenizer, file: Path, foreign: ImportedModel) -> None:
    shape = foreign.shape
    for what, own, wanted in (
        ("begin-of-document id", tokenizer.bos_id, shape.bos_id),
        ("end-of-document id", tokenizer.eos_id, next(iter(shape.eos_ids), None)),
    ):
        if wanted is not None and own != wanted:
            raise InteropError(
                f"{file} is not the tokenizer of this model: its {what} is {own}, config.json says {wanted}"
            )


def _settings(foreign: ImportedModel, tokenizer_file: Path) -> RunSettings:
    shape, plain = foreign.shape, TrainingSettings()
    # The training data of an imported model are unknown; only its length and sizes are recorded.
    choice = SentencePieceSettings(model=str(tokenizer_file), vocab_size=max(264, shape.vocab_size))
    targets = min(plain.validation.targets, shape.train_length)
    steps = 1000 * plain.batch_size * shape.train_length
    return RunSettings(
        train_length=shape.train_length,
        original_length=shape.original_length,
        model=shape.model,
        data=DataSettings(tokenizer=choice, bos=shape.bos_id is not None, eos=bool(shape.eos_ids)),
        training=TrainingSettings(
            tokens=max(plain.tokens, steps), validation=ValidationSettings(targets=targets)
        ),
    )


if __name__ == "__main__":
    run_main(main)
