"""The HTTP interface: OpenAI's /v1/models and /v1/completions, and the page at /."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from errors import UserError
from generation.continuous_batch import GenerationRow
from generation.samples import Sample, make_samples
from generation.text_stream import TextStream
from interop.server.choices import FINISH, Choice, Completion, Delta
from interop.server.engine import Engine
from interop.server.requests import ApiError, CompletionRequest, parse_request
from interop.server.served_run import ServedRun

PAGE = Path(__file__).with_name("page.html")
# other Host headers are refused: they come from pages of other sites
LOOPBACK = ["127.0.0.1", "localhost"]
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
RETRY_AFTER = 1  # seconds, of a full queue


@dataclass(frozen=True)
class Limits:
    """Limits of the server.

    Attributes:
        rows: choices that are generated at a time.
        queue: choices that wait.
        body: bytes of a request.
        read_seconds: maximum time for the body of a request to arrive.
        send_seconds: maximum time for a client to accept a part of a response.
    """

    rows: int = 32
    queue: int = 256
    body: int = 1 << 20
    read_seconds: float = 30.0
    send_seconds: float = 60.0


def make_app(served: ServedRun, limits: Limits) -> Starlette:
    """The ASGI application. Its `state.engine` is the running engine."""
    engine = Engine(served.batch, limits.rows, limits.queue)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        engine.close()

    page = PAGE.read_text(encoding="utf-8")

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": served.models()})

    async def model(request: Request) -> Response:
        method = served.method_of(request.path_params["name"])
        return JSONResponse(served.about(method))

    app = Starlette(
        routes=[
            Route("/", show_page),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", CompletionEndpoint(served, engine, limits), methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.engine = engine
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, error.detail), error.headers)


def error_response(error: ApiError, headers: Any = None) -> Response:
    headers = dict(headers or {})
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_AFTER)
    return JSONResponse(error.body(), error.status, headers)


def error_of(error: Exception) -> ApiError:
    """The response to an error of the engine: 400 for the user's errors, else 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    return ApiError(500, "generation failed; the server's log has the reason")


class ClientGone(Exception):
    """The client has disconnected or does not read its response."""


class CompletionEndpoint:
    """POST /v1/completions, as an ASGI application: it must notice a client that disconnects."""

    def __init__(self, served: ServedRun, engine: Engine, limits: Limits):
        self.served = served
        self.engine = engine
        self.limits = limits

    async def __call__(self, scope, receive, send) -> None:
        try:
            asked = parse_request(await self._body(Request(scope, receive)))
            method = self.served.method_of(asked.model)
            # Encoding a long prompt takes a while; other requests go on.
            choices = await asyncio.to_thread(self._choices, asked, method)
            completion = Completion(method, choices, asyncio.get_running_loop())
            self.engine.submit(completion)
        except ClientDisconnect:
            return
        except UserError as error:
            await error_response(error_of(error))(scope, receive, send)
            return
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await _Responder(
                asked, completion, self.served.name_of(method), gone, send, self.limits
            ).run()
        except ClientGone:
            pass
        finally:
            gone.cancel()
            self.engine.cancel(completion)

    async def _body(self, request: Request) -> bytes:
        """The body, read up to its limit. Raises ApiError (408, 413, 415)."""
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise ApiError(415, "set the header Content-Type: application/json")
        too_large = ApiError(
            413, f"the body is larger than {self.limits.body} bytes", code="body_too_large"
        )
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self.limits.body:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.body:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time") from None
        return bytes(body)

    def _choices(self, asked: CompletionRequest, method: str) -> list[Choice]:
        run = self.served.run
        sampling = asked.sampling
        seed = asked.first_seed()
        tokenizer = run.tokenizer
        count = asked.n or 1
        samples: list[Sample] = []
        if isinstance(asked.prompts[0], str):
            samples = make_samples(
                asked.prompts,  # pyright: ignore[reportArgumentType]
                tokenizer,
                bos=run.settings.data.bos,
                count=count,
                seed=seed,
                stops=asked.stops,
            )
        else:
            for index, ids in enumerate(asked.prompts):
                self.served.check(method, [ids], asked.tokens)  # pyright: ignore[reportArgumentType]
                text = tokenizer.decode(list(ids))  # pyright: ignore[reportArgumentType]
                for i in range(count):
                    stream = TextStream(tokenizer, asked.stops, begins=not text)
                    samples.append(Sample(text, list(ids), index, seed + i, stream))  # pyright: ignore
        self.served.check(method, [sample.ids for sample in samples], asked.tokens)
        return [
            Choice(
                sample,
                GenerationRow(
                    sample.ids,
                    asked.tokens,
                    sampling,
                    sample.seed,
                    logprobs=asked.logprobs,
                    score_prompt=bool(asked.echo) and asked.logprobs is not None,
                ),
                tokenizer,
                echo=bool(asked.echo),
            )
            for sample in samples
        ]


class _Responder:
    """Sends the response of one completion, whole or as server-sent events."""

    def __init__(
        self,
        asked: CompletionRequest,
        completion: Completion,
        model: str,
        gone: asyncio.Future,
        send,
        limits: Limits,
    ):
        self.asked = asked
        self.completion = completion
        self.gone = gone
        self._raw_send = send
        self.limits = limits
        self.common = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def run(self) -> None:
        if self.asked.stream:
            await self._stream()
            return
        while not self.completion.is_complete:
            await self._news()
        if self.completion.error is not None:
            await self._send_all(error_response(error_of(self.completion.error)))
            return
        choices = [
            self._choice(i, choice.take()) for i, choice in enumerate(self.completion.choices)
        ]
        await self._send_all(
            JSONResponse(self.common | {"choices": choices, "usage": self.completion.usage()})
        )

    async def _stream(self) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            complete = self.completion.is_complete
            error = self.completion.error
            for i, choice in enumerate(self.completion.choices):
                delta = choice.take()
                if delta.text or delta.entries or delta.finish:
                    await self._event(self.common | {"choices": [self._choice(i, delta)]})
            if error is not None:
                await self._event(error_of(error).body())
            if complete:
                break
            await self._news()
        if self.asked.stream_options and self.asked.stream_options.include_usage and error is None:
            await self._event(self.common | {"choices": [], "usage": self.completion.usage()})
        await self._send(
            {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        )

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = None if self.asked.logprobs is None else delta.logprobs()
        finish = FINISH[delta.finish] if delta.finish else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": finish}

    async def _news(self) -> None:
        """Wait for new tokens. Raises ClientGone if the client disconnects first."""
        news = asyncio.ensure_future(self.completion.news.wait())
        try:
            await asyncio.wait([news, self.gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        if self.gone.done():
            raise ClientGone
        self.completion.news.clear()

    async def _event(self, content: dict[str, Any]) -> None:
        body = f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _send_all(self, response: Response) -> None:
        start = {"type": "http.response.start", "status": response.status_code}
        await self._send(start | {"headers": response.raw_headers})
        await self._send(
            {"type": "http.response.body", "body": bytes(response.body), "more_body": False}
        )

    async def _send(self, message: dict[str, Any]) -> None:
        """Raises ClientGone if the client does not read for too long."""
        if self.gone.done():
            raise ClientGone
        try:
            async with asyncio.timeout(self.limits.send_seconds):
                await self._raw_send(message)
        except (TimeoutError, OSError):
            raise ClientGone from None


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
