"""evaluate.py, whose rank 1 sends itself a signal in its third gather of keys.

python tests/faults/lost_in_evaluation.py SIGNAL TIMEOUT OVERRIDE...
"""

import os
import sys
from datetime import timedelta

import evaluate
import evaluation.ranks
from model import ContextShard
from settings.script import run_main


def main() -> None:
    number, timeout, *words = sys.argv[1:]
    evaluation.ranks.GATHER_TIMEOUT = timedelta(seconds=float(timeout))
    gather = ContextShard.gather
    calls = []

    def hit(self, x):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), int(number))
        return gather(self, x)

    if os.environ["RANK"] == "1":
        ContextShard.gather = hit
    sys.argv = ["evaluate.py", *words]
    run_main(evaluate.main)


if __name__ == "__main__":
    main()
