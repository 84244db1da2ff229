"""A page on the loopback interface that shows the loss of each token of a text under two
methods."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch

from data import PreparedData
from errors import InteropError, UserError
from evaluation.methods import TRUNCATE, compatible_methods
from generation.text_stream import TextStream
from model import TokenPositions
from run_directory.position_overrides import meta_model, override
from run_directory.run import LoadedRun, Run

HOST = "127.0.0.1"
# Requests with other Host headers are refused: they come from pages of other sites.
LOOPBACK = ("127.0.0.1", "localhost")
MAX_BODY = 1 << 20  # maximum bytes of a request
LENGTHS = 16  # the default maximum length is this multiple of the trained length
MAX_NLL = 9999.0  # NLL shown for an impossible token; JSON has no infinity
ANY_TEXT = "Once upon a time"  # shown for a run without held-out text
HTML = Path(__file__).with_name("loss_page.html")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src "
    "'self'; img-src data:; base-uri 'none'; form-action 'none'"
)


class LossPage:
    """A loaded run and the context-extension methods that apply to it.

    Args:
        run: a run loaded without overrides.
        overrides: overrides of the positional scheme, applied before the overrides of a method.
        max_length: maximum number of tokens; None: 16 times the trained length.
    """

    def __init__(
        self, run: LoadedRun, overrides: Sequence[str] = (), max_length: int | None = None
    ):
        self.run = run
        self.max_length = max_length or LENGTHS * run.settings.train_length

        def resolve(changes: Sequence[str]) -> dict:
            return override(run.settings, [*overrides, *changes]).model.positions_record()

        methods, _ = compatible_methods(run.settings.train_length, resolve)
        self.settings = {
            method.label: override(run.settings, [*overrides, *method.overrides])
            for method in methods
            if method.label != TRUNCATE
        }

    def about(self) -> dict[str, Any]:
        """The data that the page shows before a text is scored."""
        return {
            "run": self.run.folder.resolve().name,
            "train_length": self.run.settings.train_length,
            "methods": list(self.settings),
            "example": self.example(),
        }

    def example(self) -> str:
        """The start of the run's held-out text, twice the trained length, or ANY_TEXT if the run
        has no held-out text."""
        length = 2 * self.run.settings.train_length
        ids = []
        try:
            data = Run(self.run.folder).open_data()
            if not isinstance(data, PreparedData):
                return ANY_TEXT
            store = data.valid
            for i in range(store.n_documents):
                ids += store.document(i)[: length - len(ids)].tolist()
                if len(ids) == length:
                    break
        except (UserError, OSError):
            return ANY_TEXT
        return self.run.tokenizer.decode(ids)

    def score(self, text: str, methods: Sequence[str]) -> dict[str, Any]:
        """Pieces of the text, one per token, and their NLL in nats under each method.

        Raises:
            InteropError: a method is unknown, or the text is empty or too long.
        """
        tokenizer = self.run.tokenizer
        ids = tokenizer.encode(text)
        if self.run.settings.data.bos and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id, *ids]
        stream = TextStream(tokenizer, begins=True)
        pieces = [stream.push(token) for token in ids]
        nll = {method: self._nll(ids, method) for method in methods}
        return {"pieces": [*pieces[:-1], pieces[-1] + stream.end()], "nll": nll}

    @torch.no_grad()
    def _nll(self, ids: list[int], method: str) -> list[float | None]:
        """NLL of each token in nats; None for the first token, which has no context."""
        settings = self.settings.get(method)
        if settings is None:
            raise InteropError(f"unknown method {method!r}; known are {', '.join(self.settings)}")
        longest = min(self.max_length, meta_model(settings).limit or self.max_length)
        if not 2 <= len(ids) <= longest:
            raise InteropError(
                f"the text has {len(ids)} tokens, but {method} scores 2 to {longest}; change the "
                "text or --max-length"
            )
        model = self.run.model
        model.reposition(settings.model)
        tokens = torch.tensor([ids], device=model.embed.weight.device)
        losses = model(tokens[:, :-1], TokenPositions.plain(len(ids) - 1), tokens[:, 1:])[0]
        return [
            None,
            *(min(loss, MAX_NLL) if loss == loss else MAX_NLL for loss in losses.tolist()),
        ]


class PageHandler(BaseHTTPRequestHandler):
    """GET / returns the page, GET /about describes the run, POST /score scores a text."""

    timeout = 30  # seconds for a request to arrive and for a response to be accepted

    def __init__(self, page: LossPage, *connection: Any):
        self.page = page
        super().__init__(*connection)

    def do_GET(self) -> None:
        self._respond({"/": HTML.read_bytes, "/about": self.page.about})

    def do_POST(self) -> None:
        self._respond({"/score": self._score})

    def _score(self) -> dict[str, Any]:
        size = self.headers.get("Content-Length", "")
        is_json = self.headers.get_content_type() == "application/json"
        if not is_json or not size.isdigit() or int(size) > MAX_BODY:
            raise InteropError(f"the body must be JSON of at most {MAX_BODY} bytes")
        try:
            request = json.loads(self.rfile.read(int(size)))
            text = request["text"]
            methods = [str(method) for method in request["methods"]]
            is_valid = isinstance(text, str) and len(methods) <= 2
        except (ValueError, KeyError, TypeError, RecursionError):
            is_valid = False
        if not is_valid:
            raise InteropError('the body must be {"text": TEXT, "methods": [ONE or TWO]}')
        return self.page.score(text, methods)

    def _respond(self, answers: Mapping[str, Callable[[], bytes | dict[str, Any]]]) -> None:
        """Send the answer of a path, or the error with status 400."""
        status = 200
        try:
            if self.headers.get("Host", "").partition(":")[0] not in LOOPBACK:
                raise InteropError("the page is served on the loopback interface only")
            if self.path not in answers:
                raise InteropError("no such page")
            content = answers[self.path]()
        except UserError as error:
            self.close_connection = True
            status = 400
            content = {"error": str(error)}
        kind = "text/html; charset=utf-8"
        if isinstance(content, dict):
            kind = "application/json"
            content = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def make_server(page: LossPage, port: int) -> HTTPServer:
    """A server for one request at a time. Raises InteropError if the port is taken."""
    try:
        return HTTPServer((HOST, port), partial(PageHandler, page))
    except OSError as error:
        raise InteropError(
            f"port {port} cannot be used ({error.strerror}); choose another --port"
        ) from error
