"""Exit statuses of train.py for whatever started it; 0 is done."""

FAILED = 2  # an error to be mended first, here or in another process of the run

# Of those that a signal asks for: saved, unless it came before the first step.
INTERRUPTED = 130  # Ctrl-C; 128 + SIGINT, as a shell reports it
REQUEUE = 75  # SIGTERM or SIGUSR1: the same command goes on; EX_TEMPFAIL of sysexits.h
RANK_LOST = 76  # another process died or hangs: the same command goes on from the last checkpoint
