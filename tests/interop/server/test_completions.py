"""Completions over HTTP against offline generation and full forward passes."""

import asyncio
import json
import random

import httpx
import openai
import pytest
import torch

import sextant
from model import TokenPositions
from run_directory.position_overrides import override

SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.3},
]


def offline(loaded, body) -> str:
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "seed", "stop")
    options = {name: body[name] for name in names if name in body}
    return sextant.generate(loaded, body["prompt"], tokens=body["max_tokens"], **options)[0]


def events(lines) -> list[dict]:
    found = [line.removeprefix("data: ") for line in lines if line]
    assert found[-1] == "[DONE]"
    return [json.loads(one) for one in found[:-1]]


def requests(count: int) -> list[dict]:
    rng = random.Random(1)
    return [
        {
            "prompt": "".join(rng.choices("abc ü", k=rng.randint(0, 60))),
            "max_tokens": rng.randint(1, 40),
            "seed": 1000 + i,
            "stop": ["e"] if i % 5 == 0 else [],
            **SAMPLINGS[i % len(SAMPLINGS)],
        }
        for i in range(count)
    ]


async def stream(client, body) -> str:
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        found = events([line async for line in answer.aiter_lines()])
    assert found[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    return "".join(one["choices"][0]["text"] for one in found)


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_concurrent_streams_equal_offline_generation(loaded, address, count):
    asked = requests(count)

    async def all_streams():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(stream(client, body) for body in asked))

    found = asyncio.run(all_streams())
    assert found == [offline(loaded, body) for body in asked]
    assert len(set(found)) > count // 2


def test_choices_of_several_prompts_and_seeds(loaded, complete):
    prompts = ["ab", "c"]
    answer = complete(prompt=prompts, max_tokens=9, n=3, seed=5, temperature=1.0)
    expected = sextant.generate(loaded, prompts, tokens=9, samples=3, seed=5, temperature=1.0)
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    # Each prompt begins with BOS.
    assert answer["usage"] == {
        "prompt_tokens": 3 * 3 + 3 * 2,
        "completion_tokens": 54,
        "total_tokens": 69,
    }


def test_methods_are_models(loaded, client, complete):
    listed = client.get("/v1/models").json()["data"]
    names = [one["id"] for one in listed]
    assert names[0] == "tiny"
    assert {"tiny:yarn", "tiny:rerope", "tiny:window"} <= set(names)
    assert "tiny:truncate" not in names
    assert client.get("/v1/models/tiny:yarn").json() == listed[names.index("tiny:yarn")]
    body = {"prompt": "abcd" * 12, "max_tokens": 20, "temperature": 0}
    found = {
        name: complete(model=name, **body)["choices"][0]["text"] for name in ("tiny", "tiny:linear")
    }
    settings = override(loaded.settings, ["model.position.scaling={name: linear, factor: auto}"])
    assert found["tiny"] == offline(loaded, body)
    before = loaded.settings.model
    loaded.model.reposition(settings.model)
    try:
        assert found["tiny:linear"] == offline(loaded, body)
    finally:
        loaded.model.reposition(before)
    assert found["tiny"] != found["tiny:linear"]


@torch.no_grad()
@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_echo_with_logprobs_equals_a_forward_pass(loaded, complete, tokens):
    ids = [256, *b"abcabca"]
    answer = complete(prompt=ids, max_tokens=tokens, echo=True, logprobs=2, temperature=0)
    (choice,) = answer["choices"]
    scores = choice["logprobs"]
    assert choice["text"].startswith("abcabca")
    assert len(scores["tokens"]) == len(ids) + tokens
    assert scores["tokens"][:4] == ["", "a", "b", "c"]
    assert scores["text_offset"][:4] == [0, 0, 1, 2]
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    whole = list(ids)
    for at in range(1, len(ids) + tokens):
        log_p = loaded.model(torch.tensor([whole[:at]]), TokenPositions.plain(at))[
            0, -1
        ].log_softmax(-1)
        token = whole[at] if at < len(ids) else int(log_p.argmax())
        if at >= len(ids):
            whole.append(token)
        assert scores["token_logprobs"][at] == pytest.approx(float(log_p[token]), abs=1e-5)
        assert max(scores["top_logprobs"][at].values()) == pytest.approx(
            float(log_p.max()), abs=1e-5
        )


def test_streamed_parts_equal_the_whole(client, complete):
    body = {
        "prompt": "abü",
        "max_tokens": 30,
        "seed": 3,
        "echo": True,
        "logprobs": 1,
        "stop": ["q"],
    }
    whole = complete(**body)["choices"][0]
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        parts = [one["choices"][0] for one in events(answer.iter_lines())]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for key, values in whole["logprobs"].items():
        assert [x for part in parts for x in part["logprobs"][key]] == values
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [
        whole["finish_reason"]
    ]


def test_stop_strings_end_text_and_tokens(loaded, complete):
    body = {"prompt": "ab", "max_tokens": 60, "temperature": 0, "seed": 0}
    free = offline(loaded, body)
    stop = free[4:6]
    choice = complete(**body, stop=stop, logprobs=0)["choices"][0]
    assert choice["text"] == free[: free.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert all(offset < len(choice["text"]) for offset in choice["logprobs"]["text_offset"])


@pytest.mark.slow
def test_openai_client_reads_responses(address, loaded):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    body = {"prompt": "abc", "max_tokens": 12, "seed": 4, "temperature": 0.7}
    whole = client.completions.create(model="tiny", **body)
    assert whole.choices[0].text == offline(loaded, body)
    parts = client.completions.create(model="tiny", stream=True, **body)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", **body)
