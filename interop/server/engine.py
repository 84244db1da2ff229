"""The thread that generates: admits queued choices to running batches and delivers their tokens."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

from errors import UserError
from generation.continuous_batch import ContinuousBatch, GenerationRow
from interop.server.choices import Choice, Completion
from interop.server.requests import ApiError

log = logging.getLogger("sextant.server")


class Engine:
    """Generates all completions in one thread, with one running batch per context-extension method.

    Args:
        batches: makes the batch of a method; called once per method, when it is first used.
        rows: maximum number of choices that are generated at a time.
        queue: maximum number of choices that wait.
    """

    def __init__(self, batches: Callable[[str], ContinuousBatch], rows: int, queue: int):
        self.rows = rows
        self.queue = queue
        self._make = batches
        self._batches = {}
        self._waiting: deque[tuple[Completion, Choice]] = deque()
        self._active: dict[GenerationRow, tuple[Completion, Choice]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="sextant-engine", daemon=True)
        self._thread.start()

    def submit(self, completion: Completion) -> None:
        """Queue all choices of a request.

        Raises:
            ApiError: 503 if the queue is full; 400 if the request would never fit.
        """
        count = len(completion.choices)
        if count > self.rows + self.queue:
            raise ApiError(
                400,
                f"the request has {count} choices; this server accepts {self.rows + self.queue}",
                "n",
            )
        with self._changed:
            if self._closed:
                raise ApiError(503, "the server is stopping")
            if len(self._waiting) + len(self._active) + count > self.rows + self.queue:
                raise ApiError(503, "the queue is full; retry later", code="queue_full")
            self._waiting.extend((completion, choice) for choice in completion.choices)
            self._changed.notify()

    def cancel(self, completion: Completion) -> None:
        """Remove a request; its rows leave the batch before the next step."""
        with self._changed:
            completion.cancelled = True
            self._waiting = deque(one for one in self._waiting if one[0] is not completion)
            self._changed.notify()

    def load(self) -> tuple[int, int]:
        """(active, waiting) choices."""
        with self._changed:
            return len(self._active), len(self._waiting)

    def stop(self) -> None:
        """End all requests with an error (503), and generate no more."""
        with self._changed:
            self._closed = True
            pending = {id(completion): completion for completion, _ in self._waiting}
            pending |= {id(completion): completion for completion, _ in self._active.values()}
            self._changed.notify()
        for completion in pending.values():
            self._post(completion, completion.fail, ApiError(503, "the server is stopping"))

    def close(self) -> None:
        """Stop, and wait for the current step."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._waiting or self._active):
                    self._changed.wait()
                if self._closed:
                    return
                admitted = self._admitted()
            for completion, choice in admitted:
                self._admit(completion, choice)
            for batch in list(self._batches.values()):
                self._drop_cancelled()
                if len(batch):
                    self._step(batch)

    def _admitted(self) -> list[tuple[Completion, Choice]]:
        """Move choices from the queue to the active ones."""
        found = []
        while self._waiting and len(self._active) < self.rows:
            completion, choice = self._waiting.popleft()
            self._active[choice.row] = completion, choice
            found.append((completion, choice))
        return found

    def _admit(self, completion: Completion, choice: Choice) -> None:
        try:
            batch = self._batches.get(completion.method)
            if batch is None:
                batch = self._batches[completion.method] = self._make(completion.method)
            batch.admit(choice.row)
        except Exception as error:
            self._fail(completion, error)

    def _step(self, batch: ContinuousBatch) -> None:
        try:
            for row, scores in batch.step():
                found = self._active.get(row)
                if found is None:
                    continue
                completion, choice = found
                if row.error is not None:
                    self._fail(completion, row.error)
                    continue
                self._post(completion, completion.deliver, choice, choice.add(scores))
                if row.finish:
                    self._forget(row)
            batch.remove_finished()
        except Exception as error:
            for row in batch.clear():
                if row in self._active:
                    self._fail(self._active[row][0], error)

    def _drop_cancelled(self) -> None:
        for row, (completion, _) in list(self._active.items()):
            if completion.cancelled:
                row.finish = "stop"
                self._forget(row)
        for batch in self._batches.values():
            batch.remove_finished()

    def _fail(self, completion: Completion, error: Exception) -> None:
        """End all choices of a request with an error."""
        if not isinstance(error, UserError):
            log.error("a request failed", exc_info=error)
        self.cancel(completion)
        self._post(completion, completion.fail, error)

    def _forget(self, row: GenerationRow) -> None:
        with self._changed:
            self._active.pop(row, None)

    def _post(self, completion: Completion, function: Callable, *arguments) -> None:
        """Call a function on the event loop, which may be closed while the server ends."""
        with contextlib.suppress(RuntimeError):
            completion.loop.call_soon_threadsafe(function, *arguments)
