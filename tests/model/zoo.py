"""The cases of the conformance suite: every positional scheme, and a small model.

Every scheme of `SCHEMES` is included with its default settings, with a window, and in a layer
pattern; variants.yaml adds variants of a scheme, and mixers.yaml layers that are not softmax attention.

All sizes differ, so that a swapped axis fails: B 2 or 4, T 19, H 6, G 3, D 10, C 28, V 37.
"""

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
import yaml

from model import SCHEMES, ModelError, ModelSettings, TokenPositions, Transformer
from model.position import PositionalScheme
from tests.files import ROOT, table

H = 6
G = 3
D = 10
C = 28
V = 37
LAYERS = 2  # one more in patterns, whose first kind then has two
# trained length, and a length beyond it
TRAIN = 11
T = 19
WINDOW = 5


EXTRAS: dict[str, dict[str, dict]] = table("model/variants.yaml")
_NEAR = {"name": "rope", "window": 4, "theta": 100.0}
_PATTERNS = {f"pattern-{name}": {"near": _NEAR, "far": {"name": name}} for name in SCHEMES}


def _cases() -> dict[str, dict]:
    cases: dict[str, dict] = {}
    for name in SCHEMES:
        cases[name] = {"name": name}
        cases[f"{name}-window"] = {"name": name, "window": WINDOW}
        for variant, keys in EXTRAS.get(name, {}).items():
            cases[f"{name}-{variant}"] = {"name": name, **keys}
    for name, kinds in _PATTERNS.items():
        cases[name] = {"name": "pattern", "layers": ["near", "far"], "kinds": kinds}
    return cases


CASES = _cases()


CONFIGS = ROOT / "configs" / "mixer"
RECURRENT = ("retnet", "gla", "mamba2", "deltanet", "gated_deltanet", "kda")
SMALL_RANKS = {"decay_rank": 7, "gate_rank": 8}


def _recurrent(name: str) -> dict:
    """The mixer of configs/mixer/NAME.yaml, in sizes for tests."""
    mixer = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]["mixer"]
    ranks = {key: rank for key, rank in SMALL_RANKS.items() if key in mixer}
    return {**mixer, **ranks, "chunk": 4, "value_dim": 12}


_MIXERS = table("model/mixers.yaml")
LINEAR: dict[str, dict] = _MIXERS["linear"]
GATED: dict[str, dict] = _MIXERS["gated"]
MIXER_CASES: dict[str, dict] = LINEAR | GATED | _MIXERS["others"]
for _name, _scheme in itertools.product(RECURRENT, ("none", "rope")):
    _case = {"position": {"name": _scheme}, "mixer": _recurrent(_name)}
    MIXER_CASES[f"{_name}-{_scheme}"] = _case
MIXER_CASES["hybrid"]["kinds"]["delta"]["mixer"] = _recurrent("gated_deltanet")
QUICK_MIXERS = (
    *LINEAR,
    *GATED,
    "gated_deltanet-rope",
    "kda-none",
    "mamba2-none",
    "short_convolution-none",
    "latent-rope",
    "hybrid",
)


def every_case(test: Callable) -> Callable:
    """Parametrize by `case`. Every third case is quick, other ones for each test; the others are
    slow."""
    offset = zlib.crc32(test.__name__.encode())
    params = [
        pytest.param(case, marks=() if (index + offset) % 3 == 0 else pytest.mark.slow)
        for index, case in enumerate(CASES)
    ]
    return pytest.mark.parametrize("case", params)(test)


def every_mixer(test: Callable) -> Callable:
    """`every_case`, and the mixers that are not softmax attention of keys and values."""
    mark = every_case(test).pytestmark.pop()
    mixers = [
        pytest.param(case, marks=() if case in QUICK_MIXERS else pytest.mark.slow)
        for case in MIXER_CASES
    ]
    return pytest.mark.parametrize("case", [*mark.args[1], *mixers])(test)


# One case for each way in which a scheme acts on attention or on the cache.
MECHANISMS = (
    "learned",  # a table of positions, with a limit
    "rope",  # a rotation
    "xpos",  # different rotations of queries and keys
    "rope-yarn-auto",  # frequencies per row
    "rope-window",  # a mask
    "rope-self-extend",  # two views of the keys
    "alibi",  # a fixed bias
    "fire",  # a learned bias
    "fox",  # a bias of the content, and what it caches
    "cope",  # explicit weights
    "path",  # transformed queries and keys
    "none-ssmax",  # a temperature and a sink logit
    "pattern-none",  # two kinds of layers
    "hybrid-heads",  # states in some layers
)


def each_mechanism(cases: Iterable[str]) -> Callable:
    """Parametrize by `case`. Those of MECHANISMS and QUICK_MIXERS are quick, the others slow."""
    quick = (*MECHANISMS, *QUICK_MIXERS)
    params = [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize("case", params)


def without_pattern_scheme(model: dict) -> dict:
    """The tree of `model` settings, with `position: {name: pattern, layers, kinds}` of the tables of
    cases as `pattern` and `kinds`."""
    position = model["position"]
    if position["name"] != "pattern":
        return model
    kinds = {kind: {"position": scheme} for kind, scheme in position["kinds"].items()}
    others = {key: value for key, value in model.items() if key != "position"}
    return {**others, "pattern": position["layers"], "kinds": kinds}


def settings_of(position: dict, **keys) -> ModelSettings:
    has_pattern = "pattern" in keys or position["name"] == "pattern"
    shape = {
        "dim": C,
        "layers": LAYERS + has_pattern,
        "heads": H,
        "kv_heads": G,
        "head_dim": D,
        "ffn_dim": 43,
    }
    return ModelSettings(**without_pattern_scheme({**shape, **keys, "position": position}))


def build(
    position: dict | str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    train: int = TRAIN,
    original: int | None = None,
    **keys,
) -> Transformer:
    """A random model whose every weight matters: attention is far from uniform, gains are not one.

    A scheme's tables are N(0, 1); what it has in each layer are projections of that layer's input.
    """
    if isinstance(position, str) and position in MIXER_CASES:
        keys |= MIXER_CASES[position]
        position = keys.pop("position")
    position = CASES[position] if isinstance(position, str) else position
    model = initialized(Transformer(settings_of(position, **keys), V, train, original), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape, generator=generator)
            if name.endswith(".bias"):
                p.copy_(drawn)
            elif p.ndim == 1:
                p.copy_(1 + 0.2 * drawn)
            elif name in ("embed.weight", "head.weight"):
                p.copy_(drawn * (1 if name == "embed.weight" else p.shape[1] ** -0.5))
            elif name.startswith("position.") and "-" not in name.split(".")[1]:
                p.copy_(drawn)
            else:
                p.copy_(drawn * 1.3 * p.shape[1] ** -0.5)
    return model.to(dtype).eval()


@functools.cache
def shared(case: str) -> Transformer:
    """`build(case)`, the same model for all tests, which must not change it."""
    return build(case)


def initialized(model: Transformer, seed: int) -> Transformer:
    """The model with its initial weights, every one of which `initialize` must write."""
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    model.initialize(seed)
    for name, p in model.named_parameters():
        assert p.isfinite().all(), f"{name} is not initialized"
    return model


def randomized(model: Transformer) -> Transformer:
    """Biases and norms other than 0 and 1."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
    return model


def ids(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(V, (rows, tokens), generator=torch.Generator().manual_seed(100 + seed))


def reach_of(model: Transformer, expected: int = T) -> int:
    """A length the model can place: the wanted one, or the end of its table."""
    return expected if model.limit is None else min(expected, model.limit)


def schemes_of(model: Transformer) -> list[PositionalScheme]:
    return list(model.position.values())


def is_relative(model: Transformer) -> bool:
    """A scheme that leaves the embedded tokens alone claims to know distances only, or says why
    not."""
    return all(
        type(scheme).embed is PositionalScheme.embed and "shift" not in scheme.exempt
        for scheme in schemes_of(model)
    )


def packed(cuts: list[list[int]], *, length: int | None = None, pad: int = 0) -> TokenPositions:
    """Rows of documents of the given lengths, order and position starting again with each.

    The last `pad` slots of each row are padding.
    """
    order = []
    document = []
    for lengths in cuts:
        places = []
        documents = []
        for number, count in enumerate(lengths):
            places += range(count)
            documents += [number] * count
        order.append(places + [0] * pad)
        document.append(documents + [-1] * pad)
    positions = torch.tensor(order)
    reach = int(positions.max()) + 1
    return TokenPositions(
        positions,
        positions,
        torch.tensor(document),
        "packed",
        reach,
        (length or positions.shape[1],),
    )


def shifted(tokens: int, by: int) -> TokenPositions:
    """Plain tokens at later positions."""
    plain = TokenPositions.plain(tokens)
    return replace(plain, position=plain.position + by, position_end=tokens + by)


@torch.no_grad()
def cached(
    model: Transformer, tokens: torch.Tensor, chunks: list[int], length: int | None = None
) -> torch.Tensor:
    """(B, T, V) logits of a plain batch fed to a cache in pieces of the given sizes."""
    cache = model.make_cache(tokens.shape[0], tokens.shape[1])
    out = []
    start = 0
    for size in chunks:
        positions = TokenPositions.plain(size, offset=start, length=length or tokens.shape[1])
        out.append(model(tokens[:, start : start + size], positions, cache=cache))
        start += size
    assert start == tokens.shape[1]
    return torch.cat(out, dim=1)


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-10) -> None:
    """Absolute agreement: logits of the zoo's models are of order one."""
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def refusal(call: Callable, error: type[Exception] = ModelError) -> str:
    """The message of the error that the call raises."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)
