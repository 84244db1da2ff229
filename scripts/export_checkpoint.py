"""Write the weights of a checkpoint, sharded or not, to one safetensors file.

    python scripts/export_checkpoint.py runs/quickstart --out weights.safetensors
    python scripts/export_checkpoint.py runs/quickstart --step 500 --out weights.safetensors

Tensors have the names of the model's parameters; tied weights are written once. For a run with training.ema
the EMA weights are written, with --weights last the last weights. The header contains run, step and hash.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script, from any directory

from safetensors import SafetensorError
from safetensors.torch import save_file

from data.files import sync
from errors import TrainingError
from training.checkpoint.snapshot import weights_of
from training.logging.console import Console
from training.run.directory import load
from training.script import Parser, run_main


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--step", type=int, help="of the checkpoint; by default the newest good one")
    parser.add_argument("--weights", choices=("last", "ema"), help="default: ema if the run has EMA weights")
    parser.add_argument("--out", type=Path, required=True, help="the file, which must not exist yet")
    options = parser.parse_args()
    if options.out.exists():
        raise TrainingError(f"{options.out} already exists; choose another name or move it")
    if not options.out.absolute().parent.is_dir():
        raise TrainingError(f"{options.out}: its folder does not exist; make it first")
    loaded = load(options.run, checkpoint=options.step, weights=options.weights)
    weights = weights_of(loaded.model)
    metadata = {"run": str(loaded.folder), "step": str(loaded.step), "hash": loaded.checkpoint_hash}
    draft = options.out.with_name(f".{options.out.name}.{os.getpid()}")
    try:
        save_file(weights, draft, {"format": "pt"} | metadata)
        sync(draft)
        os.replace(draft, options.out)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{options.out} cannot be written: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
    size = options.out.stat().st_size / 1e6
    Console().info(f"{options.out}: {len(weights)} tensors of step {loaded.step}, {size:,.1f} MB")
    return 0


if __name__ == "__main__":
    run_main(main)
