"""Exit statuses of train.py for whatever started it; 0 is done, 2 an error to be mended first."""

INTERRUPTED = 130  # Ctrl-C: saved if there was a step; 128 + SIGINT, as a shell reports it
REQUEUE = 75  # SIGTERM or SIGUSR1: saved if there was a step, and the same command goes on; EX_TEMPFAIL of sysexits.h
RANK_LOST = 76  # another process died or hangs: the same command goes on from the last checkpoint
