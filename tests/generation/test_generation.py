"""Generation: with and without cache, ragged batches against single rows, end of document,
errors."""

import copy

import pytest
import torch

from data.tokenizers import ByteTokenizer
from generation.decoding import Generation
from generation.samples import make_samples
from generation.sampling import SamplingParams
from model import ModelError, TokenPositions, Transformer
from model.decoding import pack
from tests.model.zoo import CASES, build, close, each_mechanism

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=1.3, top_p=0.95)
RAGGED = [[5, 17, 3, 22, 9, 1, 30], [8], [11, 2, 28, 6]]
NEW = 13
# Large numbers, under which every row repeats one token.
DROWNED = {"integer", "integer-window"}


def tiny(case: str = "rope") -> Transformer:
    """A model trained shorter than what is asked of it, unless its table would end."""
    model = build(case, train=9)
    return model if model.limit is None else build(case, train=40)


def rows(model, prompts=RAGGED, sampling=GREEDY, tokens=NEW, **options) -> list[list[int]]:
    found = [[] for _ in prompts]
    for new in Generation(model, prompts, tokens, sampling, **options):
        for row, token in zip(found, new, strict=True):
            if token is not None:
                row.append(token)
    return found


@each_mechanism(sorted(set(CASES) - DROWNED))
def test_tokens_are_independent_of_cache_chunks_and_batch(case):
    model = tiny(case)
    seeds = [4, 4, 6]
    slow = rows(model, sampling=SAMPLED, seeds=seeds, cache=False)
    for options in ({}, {"prefill_chunk": 3}):
        assert rows(model, sampling=SAMPLED, seeds=seeds, **options) == slow
        # a lone prompt takes the plain layout, a ragged batch does not
        for row, prompt in enumerate(RAGGED):
            assert rows(model, [prompt], SAMPLED, seeds=[seeds[row]], **options) == [slow[row]]
    assert Generation(model, RAGGED, 3).positions.layout == "ragged"
    assert rows(pack(copy.deepcopy(model)), sampling=SAMPLED, seeds=seeds) == slow
    logits = model(torch.tensor([[1, 2, 3]]), TokenPositions.plain(3))
    logits.sum().backward()  # tables first built while generating
    assert all(len(row) == NEW for row in slow)
    varied = {token for row in slow for token in row}
    assert len({tuple(row) for row in slow}) == 3
    assert len(varied) > 3  # else it could tell nothing


@pytest.mark.parametrize(
    "case",
    ["rope-yarn-auto", "rope-dynamic", "alibi-auto", "unit_interval-current", "none-stretch"],
)
def test_declared_length_is_prompt_and_new_tokens_per_row(case, monkeypatch):
    """The logits of each step, alone and beside longer rows, are those of a full pass whose declared
    length is prompt + tokens, not the length so far."""
    model = tiny(case)
    seen = []
    real = SamplingParams.choose

    def choose(self, logits, *more):
        seen.append(logits.clone())
        return real(self, logits, *more)

    monkeypatch.setattr(SamplingParams, "choose", choose)
    together = rows(model)
    in_batch = torch.stack(seen)  # (NEW, B, V)
    for row, prompt in enumerate(RAGGED):
        seen.clear()
        assert rows(model, [prompt])[0] == together[row]
        ids = torch.tensor([prompt + together[row][:-1]])
        places = TokenPositions.plain(ids.shape[1], length=len(prompt) + NEW)
        with torch.no_grad():
            full = model(ids, places)[0, len(prompt) - 1 :]
        close(torch.cat(seen), full)
        close(in_batch[:, row], full)


def test_each_token_has_its_own_random_number(monkeypatch):
    drawn = []

    def choose(self, logits, previous, u):
        drawn.extend(u[:, 0].tolist())
        return logits.argmax(-1)

    monkeypatch.setattr(SamplingParams, "choose", choose)
    rows(tiny(), sampling=SAMPLED, seeds=[1, 2, 3])
    assert len(set(drawn)) == 3 * NEW


def test_seeds_determine_tokens_and_are_zero_unless_given():
    model = tiny()
    prompt = RAGGED[0]
    first, again, other = rows(model, [prompt] * 3, SAMPLED, tokens=40, seeds=[7, 7, 8])
    assert first == again != other
    assert rows(model, [prompt], SAMPLED, tokens=40, seeds=[7]) == [first]
    # Holds because positions do not depend on the declared length here.
    assert rows(model, [prompt], SAMPLED, tokens=11, seeds=[7]) == [first[:11]]
    drawn = rows(model, [prompt] * 2, SAMPLED)
    assert drawn == rows(model, [prompt] * 2, SAMPLED, seeds=[0, 0])


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abc", "bc", "stop"),
        ("abc", "c", "stop"),
        ("abc", "cd", "length"),
        ("abc", "b", "stop"),
    ],
)
def test_stop_string_completed_by_the_last_token_is_a_stop(text, stop, expected):
    (sample,) = make_samples(
        ["x"],
        ByteTokenizer(),
        bos=True,
        count=1,
        seed=0,
        stops=[stop],
    )
    for token in text.encode():
        if sample.finish is None:
            sample.add(token, "length" if token == ord("c") else None)
    assert sample.finish == expected
    assert sample.text == text.partition(stop)[0]


def test_repetition_penalty_ignores_padding():
    model = tiny()
    strong = SamplingParams(temperature=0, repetition_penalty=1e9)
    found = rows(model, sampling=strong)
    with torch.no_grad():  # the slow twin: penalize by hand from full passes
        for prompt, row in zip(RAGGED, found, strict=True):
            ids = list(prompt)
            for _ in range(NEW):
                logits = model(torch.tensor([ids]), TokenPositions.plain(len(ids)))[0, -1].clone()
                for i in set(ids):
                    logits[i] = logits[i] / 1e9 if logits[i] > 0 else logits[i] * 1e9
                ids.append(int(logits.argmax()))
            assert row == ids[len(prompt) :]
    assert found != rows(model)


def test_a_generation_that_is_left_frees_its_buffers():
    generation = Generation(tiny(), RAGGED, NEW, GREEDY)
    steps = iter(generation)
    next(steps)
    next(steps)
    assert generation.decode is not None
    steps.close()
    assert generation.decode is None


@pytest.mark.parametrize("count", [1, 2])
def test_eos_is_per_row(count):
    model = tiny()
    free = rows(model)
    ends: list[int] = []
    for row in free[1 : 1 + count]:
        others = {*free[0][:3], *ends}
        ends.append(next(token for token in row[3:] if token not in others))
    generation = Generation(model, RAGGED, NEW, GREEDY, eos_ids=ends)
    for *given, expected, finish in zip(*generation, free, generation.finish, strict=True):
        length = next((i + 1 for i, token in enumerate(expected) if token in ends), NEW)
        assert given == expected[:length] + [None] * (len(given) - length)
        assert finish == ("eos" if expected[length - 1] in ends else "length")


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, SamplingParams(0.7, temperature=2.0, min_p=0.0)]
)
def test_padding_of_the_vocabulary_is_not_sampled(sampling):
    """Rows of the embedding that are no ids have the largest logits; without them, nothing
    changes."""
    small = tiny()
    padded = Transformer(small.settings, 43, 9).to(torch.float64)
    with torch.no_grad():
        for name, weight in padded.named_parameters():
            own = small.get_parameter(name)
            weight[: len(own)] = own
            if len(own) < len(weight):
                weight[len(own) :] = 50 * own[:6]
    seeds = [3, 4, 5]
    expected = rows(small, sampling=sampling, seeds=seeds)
    assert rows(padded, sampling=sampling, seeds=seeds) != expected
    assert rows(padded, sampling=sampling, seeds=seeds, vocab_size=37) == expected
    with pytest.raises(ModelError):
        Generation(padded, [[37]], 2, vocab_size=37)


def test_rows_can_be_stopped():
    generation = Generation(tiny(), RAGGED, NEW, GREEDY)
    seen = []
    for new in generation:
        seen.append(new)
        if len(seen) == 2:
            generation.stop(1)
        if len(seen) == 4:
            generation.stop(0)
            generation.stop(2)
    assert [sum(step[row] is not None for step in seen) for row in range(3)] == [4, 2, 4]
    assert generation.finish == ["stop"] * 3


def test_learned_table_is_used_to_its_end():
    model = build("learned", train=12)
    prompt = RAGGED[0]  # 7 tokens; the last new token is drawn and never placed
    plain = rows(model, [prompt], tokens=6)
    assert len(plain[0]) == 6
    assert rows(model, [prompt], tokens=6, positions=[range(13)]) == plain
    with pytest.raises(ModelError, match="13 positions"):
        Generation(model, [prompt], 6, positions=[range(1, 14)])
    with pytest.raises(ModelError, match=r"prompt of 7 .*7 new.*13 positions.*at most 6"):
        Generation(model, [prompt], 7)
    with pytest.raises(ModelError, match="shorten the prompt"):
        Generation(model, [[1] * 13], 1)


@pytest.mark.parametrize(
    ("prompts", "tokens", "overrides"),
    [
        ([], 3, "no prompt"),
        ([[1], []], 3, "prompt 2 "),
        ([[1, 37]], 3, "prompt 1 .*token 37.* 0 to 36"),
        ([[1]], 0, "at least 1 new token"),
    ],
)
def test_invalid_requests_are_rejected(prompts, tokens, overrides):
    with pytest.raises(ModelError, match=overrides):
        Generation(tiny("none"), prompts, tokens)


def test_diverged_model_raises():
    model = tiny("none")
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        next(iter(Generation(model, [[1]], 2)))


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("rope", (530, 519)),
        ("rope", (513,)),  # one more than a table has at first
        ("rope-window", (510,)),  # the table grows between passes of one token
    ],
)
def test_tables_grow_with_a_long_prompt(case, sizes):
    model = build(case, train=9)
    prompts = [[(7 * i) % 37 for i in range(n)] for n in sizes]
    for cache in (True, False):  # of a model that knows distances only; the last input is at 512
        options = {"tokens": 2, "cache": cache}
        given = [range(505, 514)]
        expected = rows(build(case, train=9), [RAGGED[0]], **options)
        assert rows(build(case, train=9), [RAGGED[0]], positions=given, **options) == expected
    found = rows(model, prompts, tokens=5, prefill_chunk=100)
    assert found == rows(build(case, train=9), prompts, tokens=5, cache=False)
