"""Passes of one token per row with a growing and a static cache, against one full pass."""

import copy
import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

import model.attention.kernels as kernels
from model import TokenPositions, Transformer, decoding
from model.decoding import GrowingDecoder, make_decoder, pack, packed, planned, static
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
def first_form(model: Transformer, static: bool | None) -> type:
    """The form of a decoder of plain rows."""
    return type(decoder_of(model, ids(2, 11), TokenPositions.plain(11), static))


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
        decoded = [decode(tokens[:, at]) for at in range(prompt, length)]
        close(torch.stack(decoded, 1), model(tokens, positions)[:, prompt:])


@each_mechanism([*CASES, *QUICK_MIXERS])
@pytest.mark.parametrize("static", [None, False, True])
def test_passes_match_a_full_pass(case, static):
    """A growing cache is checked once where it is the choice on a CPU as well."""
    model = shared(case)
    if static is not False or first_form(model, None) is not GrowingDecoder:
        check(model, static)


@pytest.mark.parametrize("name", ["rope", "stick_breaking", "cope", "fox"])
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
        *((case, True, StaticDecoder) for case in ("rope-self-extend", "cope", "fox", "path")),
    ],
)
def test_form_of_the_passes(case, static, form):
    assert first_form(shared(case), static) is form


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
    near, far = (index.slots for index in decode._kept.cache.indices.values())
    assert far == 60
    assert near <= PROMPT + 4 + 4


# rows, tokens of the prompt and all tokens, and padding of the second row
GENERATIONS = [
    (2, 7, 15, 0),
    (2, 4, 13, 0),
    (2, 7, 15, 3),
    (3, 5, 15, 0),
    (2, 9, 18, 0),
]


def generated(model: Transformer, rows: int, prompt: int, length: int, padding: int):
    """(B, T, V) logits of passes with a static cache, and their decoder."""
    length = reach_of(model, length)
    tokens = ids(rows, length, seed=length)
    positions = TokenPositions.plain(length)
    if padding:
        counts = [prompt - padding * (row == 1) for row in range(rows)]
        positions = TokenPositions.left_padded(counts, length)
    decode = decoder_of(model, tokens, positions, True, prompt)
    return torch.stack([decode(tokens[:, at]).clone() for at in range(prompt, length)], 1), decode


def check_equal(model: Transformer, *sizes) -> None:
    """Bit for bit the logits of a copy, which has generated nothing."""
    found, _ = generated(model, *sizes)
    assert torch.equal(found, generated(copy.deepcopy(model), *sizes)[0])


@each_mechanism([*CASES, *QUICK_MIXERS])
@torch.no_grad()
def test_later_generations_equal_first_ones(case, monkeypatch):
    """Also after passes that change all buffers, as the recording of a CUDA graph does; the second
    generation and the last one use buffers of the first."""
    model = build(case)
    if first_form(model, True) is GrowingDecoder:
        return

    def recorded(function, x):
        for _ in range(3):
            function(x)

    model.recordings.clear()
    fresh = copy.deepcopy(model)
    expected = {}
    monkeypatch.setattr(static, "recorded", lambda function, x: None)
    for sizes in GENERATIONS[:3]:
        fresh.recordings.clear()
        expected[sizes], _ = generated(fresh, *sizes)
    monkeypatch.setattr(static, "recorded", recorded)
    for sizes in (*expected, GENERATIONS[0]):
        assert torch.equal(generated(model, *sizes)[0], expected[sizes])


@torch.inference_mode()
def test_recordings_are_found_by_shape_and_die_with_the_model():
    model = build("rope")
    kept = []
    for sizes in (*GENERATIONS[:4], *GENERATIONS[:4]):
        _, decode = generated(model, *sizes)
        kept.append(decode._kept)
        del decode
    assert kept[0] is kept[1]
    assert len(set(kept)) == 3
    assert kept[:4] == kept[4:]
    assert copy.deepcopy(model).recordings == []
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_unused_recordings_make_room_for_a_new_one(monkeypatch):
    model = build("rope")
    sizes = [GENERATIONS[n] for n in (0, 2, 3)]
    _, used = generated(model, *sizes[0])
    unused, new = (generated(model, *each)[1]._kept for each in sizes[1:])
    assert model.recordings == [new, unused, used._kept]
    monkeypatch.setattr(static, "KEPT_BYTES", unused.nbytes + new.nbytes - 1)
    last = generated(model, *GENERATIONS[4])[1]._kept
    assert model.recordings == [last, new, used._kept]
    cache = [x for layer in last.cache.layers for x in layer._buffers.values()]
    assert last.nbytes == static.GRAPH_BYTES + 8 * sum(x.numel() for x in cache)  # float64
    model.eval()
    assert len(model.recordings) == 3
    model.train()
    assert model.recordings == []


@torch.no_grad()
def test_a_moved_model_keeps_no_recordings():
    model = build("rope")
    generated(model, *GENERATIONS[0])
    model.float()
    assert model.recordings == []


@torch.no_grad()
def test_decoders_that_are_used_in_turns():
    model = build("rope-window")
    tokens = [ids(2, 15, seed=n) for n in range(2)]
    plain = TokenPositions.plain(15)
    decoders = [decoder_of(model, x, plain, True) for x in tokens]
    for at in range(PROMPT, 15):
        for decode, x in zip(decoders, tokens, strict=True):
            close(decode(x[:, at]), model(x[:, : at + 1])[:, -1])


@pytest.mark.parametrize("settings", BLOCKS, ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
@torch.no_grad()
def test_later_generations_use_the_weights_of_their_time(settings, is_packed):
    model = randomized(build("rope", **settings))
    if is_packed:
        pack(model)
    sizes = GENERATIONS[0]
    check_equal(model, *sizes)
    recording = model.recordings[0]
    for weight in model.parameters():  # as an optimizer
        weight.mul_(1.01)
    check_equal(model, *sizes)
    model.load_state_dict(build("rope", seed=4, **settings).state_dict())
    check_equal(model, *sizes)
    assert model.recordings == [recording]
    for weight in model.parameters():
        weight.data = weight * 1.01
    check_equal(model, *sizes)
    pack(model)
    check_equal(model, *sizes)


@torch.no_grad()
def test_later_generations_use_the_scheme_of_their_time():
    model = build("rope")
    before = model.settings
    position = before.position.model_copy(update={"theta": 50.0})
    for settings in (before, before.model_copy(update={"position": position}), before):
        model.reposition(settings)
        check_equal(model, *GENERATIONS[0])


COMPILED = [
    "rope",
    "alibi",
    "t5",
    "kerple",
    "fire",
    "none",
    "learned",
    "rope-yarn-auto",
    "rope-window",
    "rope-sinks",
    "rope-self-extend",
    "cope",
    "fox",
    "carope",
    "stick_breaking",
    "pattern-none",
    "latent-rope",
    "hybrid",
    "gated_deltanet-rope",
    "mamba2-none",
]


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_equal_layers_are_one_compiled_function(case, monkeypatch, fresh_dynamo):
    """With the kernels of a GPU; also in a second generation, whose graph would be replayed."""
    compile_ = torch.compile
    choose = kernels.choose

    def counted(function, **options):
        backend = CompileCounter()
        counters.append((function.__name__, backend))
        return compile_(function, backend=backend, **options)

    counters = []
    monkeypatch.setattr(torch, "compile", counted)
    monkeypatch.setattr(kernels, "choose", lambda views, v, n, device: choose(views, v, n, "cuda"))
    make = static.StaticDecoder
    monkeypatch.setattr(decoding, "StaticDecoder", lambda *args: make(*args[:4], True))
    model = build(case)
    for _ in range(2):
        check(model, True)
    counts = Counter()
    for name, counter in counters:
        counts[name] = max(counts[name], counter.frame_count)
    kinds = len(set(model.settings.layer_kinds))
    assert counts == {"_begin": 1, "_layer": kinds, "_end": 1}


@pytest.mark.parametrize("settings", [{}, {"attention_bias": "all"}], ids=str)
@torch.no_grad()
def test_decoding_on_a_gpu_stores_weights_once(settings, monkeypatch):
    """... each in its own layout, one after the other, whose values can still change."""
    for module in (packed, decoding):
        monkeypatch.setattr(module, "is_transposed", lambda weight: False)
    model = randomized(build("rope", **settings))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    sizes = GENERATIONS[0]
    with torch.inference_mode():
        _, decode = generated(model, *sizes)
    joined = [
        linear.weight.untyped_storage()
        for block in decode._kept.blocks
        for linear in (block.qkv, block.out, block.gate_up, block.down)
    ]
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert {storage.data_ptr() for storage in joined} <= own
    matrices = sum(weight.nbytes for block in model.layers for weight in block.parameters())
    assert sum(storage.nbytes() for storage in joined) < matrices
    for name, weight in model.named_parameters():
        assert weight.is_contiguous() and not weight.is_inference()
        assert torch.equal(weight, before[name])
        weight.requires_grad_()
    check_equal(model, *sizes)


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
