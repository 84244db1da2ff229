"""Requests and errors of the OpenAI completions API."""

from __future__ import annotations

import json
import secrets
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator

from errors import InteropError
from generation.sampling import SamplingParams
from settings.fields import StrictSettings

MAX_CHOICES = 256  # of one request
MAX_STOPS = 16
MAX_LOGPROBS = 20


class ApiError(InteropError):
    """An HTTP error response.

    Attributes:
        status: HTTP status.
        param: the key of the request, or None.
        code: machine-readable reason, or None.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error in the form of the OpenAI API."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


class StreamOptions(StrictSettings):
    include_usage: bool = False


class CompletionRequest(StrictSettings):
    """The body of POST /v1/completions.

    `top_k`, `min_p` and `repetition_penalty` are extensions. Parameters without support are accepted with the
    value that has no effect.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    max_tokens: int | None = Field(16, ge=0)
    temperature: float | None = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = 1.0
    seed: int | None = Field(None, ge=0, lt=2**62)
    stop: str | list[str] | None = None
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    presence_penalty: Literal[0] | None = 0
    frequency_penalty: Literal[0] | None = 0

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        def is_ids(x: Any) -> bool:
            return isinstance(x, list) and all(type(i) is int for i in x)

        if isinstance(value, list):
            if not value:
                raise ValueError("must not be an empty list")
            if not (is_ids(value) or all(isinstance(x, str) or is_ids(x) for x in value)):
                raise ValueError(
                    "must be a string, a list of strings, token ids, or a list of token ids"
                )
            if len({isinstance(x, str) for x in value}) > 1:
                raise ValueError("must not mix strings and token ids")
        elif not isinstance(value, str):
            raise ValueError(
                "must be a string, a list of strings, token ids, or a list of token ids"
            )
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                _check_utf8(text)
        return value

    @field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _zero(cls, value: Any) -> Any:
        return 0 if type(value) is float and value == 0 else value

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"must be at most {MAX_STOPS} strings, got {len(stops)}")
        return value

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return self.prompt  # pyright: ignore[reportReturnType]

    @property
    def stops(self) -> list[str]:
        return (
            [self.stop]
            if isinstance(self.stop, str)
            else [stop for stop in self.stop or [] if stop]
        )

    @property
    def tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=None if self.top_k in (-1, 0) else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )

    def first_seed(self) -> int:
        """The seed of the first choice of each prompt; random if the request has none."""
        return secrets.randbelow(2**31) if self.seed is None else self.seed


def parse_request(body: bytes) -> CompletionRequest:
    """The request in a body of JSON. Raises ApiError (400)."""
    try:
        fields = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return CompletionRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        message = "is not supported" if first["type"] == "extra_forbidden" else first["msg"]
        raise ApiError(400, f"{key}: {message.removeprefix('Value error, ')}", param=key) from error


def _check_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"contains a lone surrogate (character {error.start})") from error
