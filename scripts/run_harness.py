"""Run EleutherAI's lm-evaluation-harness on Sextant runs: its own command line, with the model
`sextant`.

    python scripts/run_harness.py --model sextant --model_args run=runs/x --tasks arc_easy
    python scripts/run_harness.py --model sextant --tasks wikitext \\
        --model_args run=runs/x,method=yarn,max_length=1024
    python scripts/run_harness.py --model sextant --model_args run=runs/x --tasks sextant_passkey \\
        --metadata '{"lengths": [128, 256, 512], "items": 50}'
    torchrun --nproc_per_node 2 scripts/run_harness.py --model sextant --model_args run=runs/x \\
        --tasks arc_easy

All options are those of the harness (`python scripts/run_harness.py run --help`). The tasks
sextant_passkey, sextant_needle, sextant_recall and sextant_variables, and the group `sextant` of
all four, accept any model of the harness. docs/evaluation.md lists the model arguments. Requires
the extra `harness`.
"""

import importlib
import sys

from interop.extras import load_extra
from interop.harness import TASKS, register_model
from settings.script import run_main


def main() -> None:
    if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return
    load_extra("lm_eval", "harness")
    register_model()
    if not any(word.partition("=")[0] == "--include_path" for word in sys.argv):
        sys.argv += ["--include_path", str(TASKS)]
    importlib.import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    run_main(main)
