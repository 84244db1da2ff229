"""Run EleutherAI's lm-evaluation-harness on Sextant runs: its own command line, with the model `sextant`.

    python scripts/run_harness.py --model sextant --model_args run=runs/x --tasks arc_easy,lambada_openai
    python scripts/run_harness.py --model sextant --model_args run=runs/x,method=yarn,max_length=1024 \\
        --tasks wikitext
    python scripts/run_harness.py --model sextant --model_args run=runs/x --tasks sextant_passkey \\
        --metadata '{"lengths": [128, 256, 512], "items": 50}'
    torchrun --nproc_per_node 2 scripts/run_harness.py --model sextant --model_args run=runs/x \\
        --tasks arc_easy

All options are those of the harness (`python scripts/run_harness.py run --help`). The tasks sextant_passkey,
sextant_needle, sextant_recall and sextant_variables, and the group `sextant` of all four, accept any model of
the harness. docs/evaluation.md lists the model arguments. Requires the extra `harness`.
"""

import importlib
import sys

from interop.harness.packages import TASKS, prefer_installed
from settings.script import run_main


def main() -> None:
    if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return
    # evaluate.py would hide the package evaluate
    prefer_installed()
    register_model()
    sys.argv = with_tasks(sys.argv)
    importlib.import_module("lm_eval.__main__").cli_evaluate()


def register_model() -> None:
    """Add `sextant` to the models of the harness.

    The harness adds its own models only while its registry is empty, so they are imported first.
    """
    importlib.import_module("lm_eval.models")
    registry = importlib.import_module("lm_eval.api.registry")
    registry.model_registry.register("sextant", target="interop.harness.lm:SextantLM")


def with_tasks(arguments: list[str]) -> list[str]:
    """The command line with our tasks as --include_path, unless it has one."""
    if any(argument.partition("=")[0] == "--include_path" for argument in arguments):
        return arguments
    return [*arguments, "--include_path", str(TASKS)]


if __name__ == "__main__":
    run_main(main)
