"""scripts/run_harness.py as a command."""

import subprocess
import sys

from tests.files import ROOT


def test_models_of_the_harness_are_registered_too():
    """And packages with the names of our scripts are found."""
    code = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "import lm_eval.__main__ as command\n"
        "command.cli_evaluate = lambda: None\n"
        "sys.argv = ['run_harness.py', '--model', 'sextant']\n"
        "from scripts.run_harness import main; main()\n"
        "from lm_eval.api.registry import get_model, model_registry\n"
        "import evaluate; assert hasattr(evaluate, 'load')\n"
        "assert {'hf', 'vllm', 'local-completions'} <= set(model_registry)\n"
        "assert get_model('sextant').__name__ == 'SextantLM'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=True)
