"""Numbers of positional schemes without a model: encodings, decays, frequencies, biases.

Every number is computed through the interface of the registered schemes, so that new schemes are
included.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from model import ModelError, TokenPositions
from model.position import (
    SCHEMES,
    AttentionContext,
    AttentionPlan,
    HeadGeometry,
    PositionalScheme,
    PositionSettings,
)
from model.position.scaling import AnyScaling, Scaling
from model.position.schemes.rope import Rope

SEED = 0  # of random parameters


@dataclass(frozen=True)
class FigureRequest:
    """What the figures are of.

    Attributes:
        dim: features of a head.
        heads: of the biases; `head` is drawn.
        train_length: L0.
        thetas: bases; figures of one base use the first.
        factor: methods are shown for this many times the trained length.
        distance: the longest distance of inner products and decay.
        tokens: number of encodings.
    """

    dim: int = 128
    heads: int = 8
    train_length: int = 2048
    thetas: Sequence[float] = (10_000.0, 500_000.0)
    factor: float = 8.0
    distance: int = 256
    tokens: int = 8
    head: int = 3

    def build(self, name: str, **settings: Any) -> PositionalScheme:
        """A scheme with its parameters initialized as in training. Raises ValidationError for
        settings that are missing, ModelError for those that do not fit the geometry."""
        settings_class, position_class = SCHEMES[name]
        geometry = HeadGeometry(
            dim=self.dim,
            heads=self.heads,
            head_dim=self.dim,
            train_length=self.train_length,
            original_length=self.train_length,
            kv_heads=self.heads,
            scale=self.dim**-0.5,
        )
        scheme = position_class(settings_class(name=name, **settings), geometry)
        scheme.initialize(torch.Generator().manual_seed(SEED), 1.0)
        return scheme.double()

    def frequencies(self, name: str, theta: float) -> Tensor:
        """(R,) float64 radians per token by which a scheme rotates pairs in a sequence of `factor`
        times the trained length."""
        scheme = self.build(name, theta=theta)
        assert isinstance(scheme, Rope)
        return scheme.frequencies(scheme.stretch(math.ceil(self.factor * self.train_length)))[0]

    def rotations(self) -> dict[str, Tensor]:
        """Frequencies of every registered scheme that rotates pairs at fixed ones, with the first
        base."""
        return {
            name: self.frequencies(name, self.thetas[0])
            for name, (settings, position) in SCHEMES.items()
            if issubclass(position, Rope) and "theta" in settings.model_fields
        }


def forms(
    settings: type[BaseModel], common: type[BaseModel]
) -> Iterator[tuple[str, dict[str, str]]]:
    """(label, overrides) of the defaults and of each other value of the class's literal fields.

    Fields of `common` are ignored.
    """
    choices = {
        key: get_args(field.annotation)
        for key, field in settings.model_fields.items()
        if key not in common.model_fields and get_origin(field.annotation) is Literal
    }
    defaults = {key: settings.model_fields[key].default for key in choices}
    yield " ".join(map(str, defaults.values())), {}
    for key, values in choices.items():
        for value in values:
            if value != defaults[key]:
                yield str(value), {key: value}


def distinct(labelled: list[tuple[str, str, Tensor]]) -> dict[str, Tensor]:
    """Those of (name, form, values) that differ, by label.

    The label includes the form if a name has several; names with equal values share a label, `ntk =
    dynamic`.
    """
    names: dict[int, dict[str, None]] = {}  # index of the first of equal values -> their names
    for n, (name, _, values) in enumerate(labelled):
        equal = [k for k in names if torch.allclose(labelled[k][2], values, rtol=1e-12, atol=1e-12)]
        names.setdefault(equal[0] if equal else n, {})[name] = None
    firsts = Counter(labelled[n][0] for n in names)
    found = {}
    for n, (name, *others) in names.items():
        label = f"{name} {labelled[n][1]}" if firsts[name] > 1 else name
        found[" = ".join([label, *others])] = labelled[n][2]
    return found


@torch.no_grad()
def plan_of(
    scheme: PositionalScheme, tokens: int, queries: int
) -> tuple[AttentionContext, AttentionPlan] | None:
    """One pass over `tokens` tokens at 0, 1, 2, ..., with queries at the last `queries`; None for a
    scheme that depends on the layer's input."""
    positions = TokenPositions.plain(tokens)
    scheme.check(positions)
    context = AttentionContext(
        new=positions,
        queries=positions.last(queries),
        keys=positions,
        batch=1,
        heads=scheme.geometry.heads,
        device=torch.device("cpu"),
        tables=scheme.tables(positions, torch.float64),
        window=scheme.settings.window,
        sinks=scheme.settings.sinks,
    )
    plan = scheme.plan(context)
    return (context, plan) if isinstance(plan, AttentionPlan) else None


@torch.no_grad()
def encodings(name: str, tokens: int) -> Tensor:
    """(tokens, 2) or more features: a token of ones encoded at 0, 1, 2, ..., through the scheme's
    embedding and its keys, with as few features as the scheme supports."""
    for dim in range(2, 2 + tokens.bit_length()):  # binary requires a feature per bit
        try:
            scheme = FigureRequest(dim=dim, heads=1, train_length=tokens).build(name)
            made = plan_of(scheme, tokens, tokens)
        except ModelError:
            continue
        assert made is not None  # no scheme that the figure shows depends on the layer's input
        context, plan = made
        x = torch.ones(1, tokens, dim, dtype=torch.float64)
        return plan.write(scheme.embed(x, context.tables, context.new)[:, None])[0, 0]
    raise ModelError(f"scheme '{name}' encodes no {tokens} positions")


@torch.no_grad()
def inner_products(theta: float, dim: int, distances: Tensor) -> Tensor:
    """p_n·p_(n+d) of sinusoidal embeddings of `dim` features, for whole distances d of either
    sign."""
    reach = int(distances.abs().max())
    scheme = FigureRequest(dim=dim, heads=1).build("sinusoidal", theta=theta)
    positions = TokenPositions.plain(2 * reach + 1)
    zero = torch.zeros(1, 2 * reach + 1, dim, dtype=torch.float64)
    table = scheme.embed(zero, scheme.tables(positions, torch.float64), positions)[0]
    return table[reach + distances] @ table[reach]


def decay(frequencies: Tensor, distances: Tensor) -> Tensor:
    """mean_j |Σ_(k<j) e^(i·d·θ_k)| over j = 1 ... R, for each distance d.

    By Abel summation it bounds the score at that distance, up to a factor that depends on the
    content: Su et al. 2021 (arXiv:2104.09864), section 3.4.3; Su's blog (kexue.fm/archives/8265).
    """
    angles = distances.double()[:, None] * frequencies
    turned = torch.polar(torch.ones_like(angles), angles)
    return turned.cumsum(-1).abs().mean(-1)


@torch.no_grad()
def bias(scheme: PositionalScheme, longest: int) -> Tensor | None:
    """(H, longest + 1) bias of the logit between a query at position `longest` and the key at each
    distance 0, 1, 2, ...; −∞ for masked keys. None if the scheme has no bias, or one that depends
    on content.
    """
    planned = plan_of(scheme, longest + 1, queries=1)
    if planned is None:
        return None
    geometry = scheme.geometry
    _, plan = planned
    q = torch.zeros(1, geometry.heads, 1, geometry.head_dim).double()
    k = torch.zeros(1, geometry.kv_heads, longest + 1, geometry.head_dim).double()
    views = plan.read(q, plan.write(k))
    if all(view.mask.bias is None for view in views) or any(view.weights_fn for view in views):
        return None
    whole = slice(0, longest + 1)
    masks = [view.mask.additive(0, 1, whole, torch.float64)[0, :, 0] for view in views]
    # disjoint views
    by_key = torch.stack([mask.expand(geometry.heads, -1) for mask in masks]).amax(0)
    return by_key.flip(-1)


def biases(request: FigureRequest) -> dict[str, tuple[Tensor, bool]]:
    """The biases (H, train_length + 1) of every registered scheme that has some, in each of its
    forms, and whether they are random initial values."""
    found = []
    random = {}
    for name, (settings, _) in SCHEMES.items():
        for form, keys in forms(settings, PositionSettings):
            try:
                scheme = request.build(name, **keys)
                values = (
                    bias(scheme, 1)
                    if bias(scheme, 1) is None
                    else bias(scheme, request.train_length)
                )
            except (ValidationError, ModelError):  # requires settings, or ends before the length
                continue
            if values is not None:
                found.append((name, form, values))
                random[name] = len(list(scheme.parameters())) > 0
    return {
        label: (values, random[label.split(" ")[0]]) for label, values in distinct(found).items()
    }


def spaced(longest: int) -> Tensor:
    """Distances from 0 to `longest`: all of the first, then 32 to each doubling, the points of a
    log axis."""
    octaves = math.log2(max(longest, 1))
    doublings = torch.arange(0, 32 * octaves + 1, dtype=torch.float64) / 32
    steps = torch.exp2(doublings).round().long().clamp(max=longest)
    return torch.cat([torch.tensor([0, longest]), steps]).unique()


def methods(plain: Tensor, request: FigureRequest) -> tuple[dict[str, Tensor], list[str]]:
    """(R,) frequencies under each scaling method, in each of its forms, for sequences of `factor`
    times the trained length; and the names of the methods that require settings."""
    spectra: list[tuple[str, str, Tensor]] = []
    left_out = []
    length = request.train_length
    for method_class in get_args(get_args(AnyScaling)[0]):
        name = method_class.model_fields["name"].default
        for form, keys in forms(method_class, Scaling):
            try:
                method = method_class(name=name, **keys)
            except ValidationError:
                left_out.append(name)
                continue
            s = method.stretch(math.ceil(request.factor * length), length)
            scaled, *_ = method.frequencies(plain, s, length)
            spectra.append((name, form, scaled))
    return distinct(spectra), left_out
