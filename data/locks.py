"""Locks on files, which go with the process that holds them, and file systems that have none."""

import fcntl
from typing import IO


def locked(file: IO, *, shared: bool = False, wait: bool = False) -> bool | None:
    """Lock an open file until it is closed or this process ends.

    True: it is ours; with `shared` maybe not alone. False: another holds it, and `wait` was not asked for.
    None: some network file systems have no locks; what is done there is as safe as it was without.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
