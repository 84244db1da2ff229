"""A process that tokenises chunks: `python -m data.worker FOLDER`.

It reads chunk names from standard input and answers each with a line of JSON. Separate interpreters are used
rather than forks, which are unsafe beside threads, and rather than `multiprocessing`'s spawn, which would
import the calling script again. It ends when that input closes, in the middle of a chunk if need be: a chunk
is sealed as a whole.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

from data.child import lines_of_starter
from data.encoding import Job
from data.errors import DataError


def main() -> None:
    lines = lines_of_starter()
    job = Job(Path(sys.argv[1]))
    while True:
        line = lines.get()
        spool, number = line.split()
        try:
            job.run(spool, int(number))
            answer = {"done": line.strip()}
        except DataError as error:
            answer = {"error": str(error), "kind": "data"}
        except OSError as error:
            answer = {"error": f"{error.strerror} ({error.filename})", "kind": "os", "errno": error.errno}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):  # nobody asks any more
        main()
