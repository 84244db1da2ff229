"""Run EleutherAI's lm-evaluation-harness on Sextant runs: the harness's own command line, with the
additional model `sextant`.

    python scripts/run_harness.py --model sextant --model_args run=runs/x --tasks arc_easy
    python scripts/run_harness.py --model sextant --tasks wikitext \\
        --model_args run=runs/x,method=yarn,max_length=1024
    torchrun --nproc_per_node 2 scripts/run_harness.py --model sextant --model_args run=runs/x \\
        --tasks arc_easy

All options are those of the harness (`python scripts/run_harness.py run --help`). docs/evaluation.md
lists the model arguments. Requires the extra `harness`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # needs no installation

from interop.extras import load_extra
from settings.script import run_main


def main() -> None:
    if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return
    load_extra("lm_eval.models", "harness")  # must run while the registry is empty
    registry = load_extra("lm_eval.api.registry", "harness")
    registry.model_registry.register("sextant", target="interop.harness:SextantLM")
    load_extra("lm_eval.__main__", "harness").cli_evaluate()


if __name__ == "__main__":
    run_main(main)
