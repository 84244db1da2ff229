"""Passes of one token per row with a growing and a static cache, against one full pass."""

import copy
from dataclasses import replace

import pytest
import torch
import torch._dynamo

from model import TokenPositions, Transformer, decoding
from model.decoding import GrowingDecoder, make_decoder, pack, planned, static
from model.decoding.planned import PlannedDecoder
from model.decoding.static import StaticDecoder
from tests.model.zoo import (
    CASES,
    QUICK_MIXERS,
    build,
    close,
    each_mechanism,
    ids,
    randomized,
    reach_of,
    shared,
)

PROMPT = 7
LINEAR = {"mixer": {"name": "linear", "chunk": 4}}
BLOCKS = [
    {},
    {"norm_placement": "output", "residual_multiplier": 0.4, "embedding_multiplier": 3.0},
    {"attention_bias": "all", "mlp_bias": True, "residual_multiplier": 0.7, "logit_softcap": 5.0},
    {"value_norm": True, "layer_scale": True, "residual_multiplier": 0.7},
    {"attention_bias": "qkv", "qk_norm": "all_heads", "tie_embeddings": True},
    {"gate": "head", "norm_placement": "output", "layer_scale": True},
    {"norm_placement": "both", "activation": "gelu_tanh", "residual_multiplier": 0.4},
    LINEAR,
]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(static, "BUCKET", 4)
    monkeypatch.setattr(decoding, "LEAST_PASSES", 2)
    monkeypatch.setattr(planned, "CHUNK", 5)


def decoder_of(model: Transformer, tokens, positions, static: bool | None = None, prompt=PROMPT):
    """The decoder after a prompt of some columns."""
    length = tokens.shape[1]
    cache = model.make_cache(len(tokens), length)
    first = positions.part(0, prompt, position_end=prompt)
    model(tokens[:, :prompt], first, cache=cache, keep=0)
    return make_decoder(model, cache, positions.part(prompt, length), static)


@torch.no_grad()
def check(model: Transformer, static: bool | None = None, length: int = 0, prompt: int = PROMPT):
    """Every pass equals a column of one pass over all tokens, in both layouts."""
    length = length or reach_of(model)
    tokens = ids(2, length)
    counts = [prompt, max(1, prompt - 4)]
    lengths = [length, length - prompt + counts[1]]
    ragged = TokenPositions.left_padded(counts, length, lengths=lengths)
    plain = TokenPositions.plain(length)
    cases = [plain, ragged]
    if model.depends_on_length:
        cases.append(replace(plain, lengths=(length, 5 * length)))
    for positions in cases:
        decode = decoder_of(model, tokens, positions, static, prompt)
        if isinstance(decode, StaticDecoder):
            for _ in range(2):  # passes that are repeated, as a recording of a CUDA graph begins
                decode(tokens[:, prompt])
            decode.cache.restart()
        decoded = [decode(tokens[:, at]) for at in range(prompt, length)]
        close(torch.stack(decoded, 1), model(tokens, positions)[:, prompt:])


@each_mechanism([*CASES, *QUICK_MIXERS])
@pytest.mark.parametrize("static", [None, False, True])
def test_passes_match_a_full_pass(case, static):
    check(shared(case), static)


@pytest.mark.parametrize("name", ["rope", "stick_breaking", "cope"])
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("prompt", [1, 9])
def test_static_windows_that_wrap_several_times(name, sinks, prompt):
    """Weights that depend on the order of the keys need slots in the order of the tokens."""
    check(build({"name": name, "window": 4, "sinks": sinks}), True, length=40, prompt=prompt)


@pytest.mark.parametrize("static", [False, True])
def test_tables_reach_the_last_token(static):
    """... which is the first one of a bucket, as is the last pass; the table of distances is as long
    as the cache."""
    check(shared("transformer_xl"), static, length=13, prompt=8)


@pytest.mark.parametrize(
    ("case", "static", "form"),
    [
        *((case, None, PlannedDecoder) for case in ("rope", "xpos", "t5", "rope-yarn-auto")),
        *((case, None, GrowingDecoder) for case in ("learned", "cope", "rope-window", "fox")),
        ("rope-self-extend", False, GrowingDecoder),
        *((case, True, StaticDecoder) for case in ("rope-self-extend", "cope", "pattern-none")),
        *((case, True, GrowingDecoder) for case in ("fox", "path", "selective_rope", "carope")),
    ],
)
@torch.no_grad()
def test_form_of_the_passes(case, static, form):
    tokens = ids(2, 11)
    decode = decoder_of(shared(case), tokens, TokenPositions.plain(11), static)
    assert type(decode) is form


@torch.no_grad()
def test_passes_under_autocast_or_of_sharded_weights_use_the_model():
    model = build("rope")
    tokens = ids(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        assert decoder_of(model, tokens, TokenPositions.plain(9)).packed is None
    model.embed.weight.device_mesh = None  # as of a shard
    assert decoder_of(model, tokens, TokenPositions.plain(9)).packed is None


@torch.no_grad()
def test_windowed_layers_of_a_static_cache_store_a_window():
    decode = decoder_of(shared("pattern-none"), ids(2, 60), TokenPositions.plain(60), True)
    near, far = (index.slots for index in decode.cache.indices.values())
    assert far == 60
    assert near <= PROMPT + 4 + 4


@pytest.mark.parametrize("settings", BLOCKS[:-1], ids=str)
def test_packing_keeps_parameters_and_their_updates(settings):
    model = randomized(build("rope", **settings))
    check(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    objects = list(model.parameters())
    check(pack(model))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    other = randomized(build("rope", seed=4, **settings))
    for changed in (model, copy.deepcopy(model)):
        changed.load_state_dict(other.state_dict())
        check(changed)
