"""The positional interface: the context of an attention pass, and the base class of positional
schemes.

The model gets all order information through this file. A scheme can change token embeddings
(`embed`), queries and keys (`AttentionPlan.read`, `AttentionPlan.write`), and query-key pairs (a
mask or bias function passed to `AttentionContext.mask`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import torch
from pydantic import model_validator
from torch import Tensor, nn

from errors import ModelError
from model.attention.kernels import precompute_masks
from model.attention.mask import (
    AttentionMask,
    AttentionView,
    BiasForms,
    BiasFunction,
    DistanceFunction,
    MaskFunction,
    Normalizer,
    QueryBlock,
    in_32_bits,
    no_autocast,
    precise,
)
from model.position.table import Constant, LookupTable
from model.position.temperature import AdaptiveTemperature, AnyTemperature, NoTemperature
from model.token_positions import TokenPositions
from settings.fields import StrictSettings, counts_if_changed, setting


@dataclass(frozen=True)
class AttentionContext:
    """The tokens, queries and keys of one forward pass, for one layer kind.

    Attributes:
        new: tokens of this pass, whose keys are written to the cache.
        queries: tokens whose outputs are computed: the last of `new`.
        keys: all cached keys, followed by those of this pass.
        tables: result of the scheme's `tables` for `new`.
        window: number of most recent keys that a query attends to, including its own; None: all.
        sinks: number of tokens at the start of each document that stay visible outside the window.
        precompute: compute masks shared by the layers before the first layer runs.
        block_masks: stores FlexAttention's block mask of all visible pairs; the same dict for all
            contexts of a pass with equal queries, keys, window and sinks.
        sequence: all tokens of a training pass whose windows are sharded, of which `new` are a
            chunk.
        is_carried: training carries keys or states from window to window.
    """

    new: TokenPositions
    queries: TokenPositions
    keys: TokenPositions
    batch: int
    heads: int
    device: torch.device
    tables: tuple[Tensor, ...] = ()
    window: int | None = None
    sinks: int = 0
    precompute: bool = False
    block_masks: dict = field(default_factory=dict, repr=False, compare=False)
    sequence: TokenPositions | None = None
    is_carried: bool = False

    def of_queries(self, x: Tensor, dim: int = 1) -> Tensor:
        """The rows of a per-new-token (or per-key) tensor that belong to the queries."""
        count = self.queries.count
        given = x.shape[dim]
        return x if count == given else x.narrow(dim, given - count, count)

    @property
    def documents(self) -> Tensor | None:
        """(B or 1, T) documents of the new tokens; None: one document in all passes."""
        return None if self.new.layout == "plain" else self.new.document

    @property
    def document_order(self) -> Tensor | None:
        """(B or 1, T) order of the new tokens; None: one document in all passes."""
        return None if self.new.layout == "plain" else self.new.order

    # Tensors indexed by mask and bias functions: (B, T) for queries, (B, S) for keys.
    @property
    def k_order(self) -> Tensor:
        return self.keys.order.expand(self.batch, -1)

    @property
    def q_position(self) -> Tensor:
        return self.queries.position.expand(self.batch, -1)

    @property
    def k_position(self) -> Tensor:
        return self.keys.position.expand(self.batch, -1)

    def mask(
        self,
        mask_mod: MaskFunction | None = None,
        bias: BiasFunction | None = None,
        forms: BiasForms | None = None,
        by_row: bool = False,
    ) -> AttentionMask:
        """The attention mask: visible pairs, restricted by `mask_mod`, with an optional bias.

        Args:
            mask_mod: elementwise over indices, the same for all heads; False masks a pair.
            bias: elementwise over indices; added to the logit after the 1/√D scale. Use
                `distance_mask` if it depends on distance alone.
            forms: other forms of the bias, for faster kernels.
            by_row: `mask_mod` or `bias` depend on the row even if positions do not, e.g. on
                content.
        """
        visible = restricted = self._visible()
        if mask_mod is not None:
            restricted = lambda b, h, i, j: visible(b, h, i, j) & mask_mod(b, h, i, j)  # noqa: E731
        is_plain = self.queries.layout == "plain"
        queries = self.queries.count
        keys = self.keys.count
        has_equal_rows = self.queries.position.shape[0] == self.keys.position.shape[0] == 1
        is_pure = bias is None and mask_mod is None
        is_same = is_plain and not by_row and (has_equal_rows or is_pure)
        mask = AttentionMask(
            batch=self.batch,
            heads=self.heads,
            queries=queries,
            keys=keys,
            device=self.device,
            mask_mod=restricted,
            separation=self.separation(),
            document=self.keys.document,
            bias=bias,
            is_plain=is_plain,
            is_band=is_plain and mask_mod is None,
            window=self.window,
            sinks=self.sinks,
            forms=forms or BiasForms(),
            unit_steps=self.keys.unit_steps and self.keys.layout != "ragged",
            rows=1 if is_same else self.batch,
            mask_rows=1 if is_plain and (mask_mod is None or is_same) else self.batch,
            shared=self.block_masks if mask_mod is None else {},
        )
        if self.precompute:
            precompute_masks(mask, mask.device.type)
        return mask

    def _visible(self) -> MaskFunction:
        """Mask function: causal, within the document and within the window.

        The mask is defined by order and document, not by tensor index. In plain layout the two are
        equivalent: order increases by one along the keys (after the sinks), so it differs from the
        index by a constant.
        """
        queries = self.queries
        keys = self.keys
        window = self.window
        sinks = self.sinks
        is_plain = queries.layout == "plain"
        # A difference of symbolic sizes, even if it is 0, is an input of the mask, which torch <
        # 2.13 cannot compile in FlexAttention.
        offset = 0 if queries is keys else keys.count - queries.count
        q_order = queries.order.expand(self.batch, -1)
        k_order = self.k_order
        q_document = queries.document.expand(self.batch, -1)
        k_document = keys.document.expand(self.batch, -1)

        def visible(b, h, i, j):
            if is_plain:
                back = i + offset - j
            else:
                back = in_32_bits(q_order[b, i]) - in_32_bits(k_order[b, j])
            seen = back >= 0
            if not is_plain:
                seen = seen & (in_32_bits(q_document[b, i]) == in_32_bits(k_document[b, j]))
            if window is not None:
                near = back < window
                seen = seen & (near | (k_order[b, j] < sinks) if sinks else near)
            return seen

        return visible

    def distance_mask(
        self,
        distance: DistanceFunction,
        tabulate: bool = False,
    ) -> AttentionMask:
        """The attention mask with a bias that depends on distance alone.

        Args:
            distance: elementwise over (head, position distance).
            tabulate: see `BiasForms.make_table`; real-valued positions have no table.
        """
        separation = self.separation()

        def bias(b, h, i, j):
            return distance(h, separation(b, i, j))

        def table() -> Tensor:
            heads = torch.arange(self.heads, device=self.device)[:, None]
            every = torch.arange(self.keys.position_end, device=self.device)[None]
            return distance(heads, every).contiguous()

        has_table = tabulate and not self.keys.position.is_floating_point()
        forms = BiasForms(distance=distance, make_table=table if has_table else None)
        return self.mask(bias=bias, forms=forms)

    def separation(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Query position − key position, elementwise over (row, query, key)."""
        q_position = self.q_position
        k_position = self.k_position
        return lambda b, i, j: in_32_bits(q_position[b, i]) - in_32_bits(k_position[b, j])


# Returns the extras (B, T, E) of T consecutive tokens from their features (B, T, F), the extras (B,
# ·, E) of earlier tokens (at least of the last one, or None), and the positions of the T tokens.
Accumulate = Callable[[Tensor, Tensor | None, TokenPositions], Tensor]


class ExtrasCache(Protocol):
    """A layer cache that stores per-token extras."""

    def extend_extras(
        self,
        features: Tensor,
        accumulate: Accumulate,
        new: TokenPositions,
    ) -> tuple[Tensor, Tensor]:
        """Add the extras of the new tokens; returns them (B, T, E) and those of all keys (B, S,
        E)."""
        ...


@dataclass(frozen=True)
class AttentionPlan:
    """How a scheme transforms queries and keys in one pass of one layer kind.

    Attributes:
        read: maps queries (B, H, T, D) and cached keys (B, G, S, ·) to attention views.
        write: maps new keys (B, G, T, D) to the form (B, G, T, ·) in which they are cached.
        linear: logits are linear in the queries. Otherwise a temperature scales the queries of the
            views.
        is_unordered: weights are known not to depend on the order of the keys in the cache.
        is_uniform: there is one view, and queries and keys are mapped linearly, token by token and
            alike in all heads.
    """

    read: Callable[[Tensor, Tensor], list[AttentionView]]
    write: Callable[[Tensor], Tensor] = field(default=lambda k: k)
    linear: bool = True
    is_unordered: bool = False
    is_uniform: bool = False

    @classmethod
    def from_mask(
        cls,
        mask: AttentionMask,
        weights_fn: Callable[[QueryBlock], Tensor] | None = None,
        extra_output: Callable[[QueryBlock, Tensor], Tensor] | None = None,
    ) -> AttentionPlan:
        """Queries and keys stay as they are; the scheme acts on pairs. See `AttentionView`."""
        return cls(
            read=lambda q, k: [AttentionView(q, k, mask, weights_fn, extra_output)],
            is_unordered=weights_fn is None,
            is_uniform=weights_fn is None,
        )

    def bind(self, x: Tensor, layer_cache: ExtrasCache | None) -> AttentionPlan:
        """The plan for the layer input x (B, T, C)."""
        return self


@dataclass(frozen=True)
class HeadGeometry:
    """The model sizes available to a scheme."""

    dim: int
    heads: int
    head_dim: int
    train_length: int
    original_length: int
    kv_heads: int
    scale: float  # the factor on q·k


class PositionSettings(StrictSettings):
    """Settings shared by all schemes."""

    # Fields that may be overridden on a trained checkpoint.
    test_time: ClassVar[frozenset[str]] = frozenset({"window", "sinks", "temperature"})
    # Whether each layer has its own instance of the scheme, with its own parameters.
    per_layer: ClassVar[bool] = False
    # Number of consecutive heads that share one projected query, which the scheme maps differently.
    heads_per_query: ClassVar[int] = 1

    name: str
    window: int | None = setting(
        None,
        "attend to this many most recent keys, including the query's own; null: all",
        ge=1,
    )
    sinks: int = setting(
        0,
        "tokens at the start of each document that stay visible outside the window",
        ge=0,
    )
    temperature: AnyTemperature = setting(
        NoTemperature(),
        "factor on the q·k term of attention logits",
    )
    sink_logit: Literal["none", "learned", "zero"] = setting(
        "none",
        "extra softmax column without a value in each head: learned logit, or logit 0",
    )
    weights: Literal["softmax", "entmax"] = counts_if_changed(
        "function from logits to weights: softmax, or entmax with α = 1.5, which gives "
        "low logits a weight of exactly 0 (arXiv:1905.05702)",
        "softmax",
    )
    shifted_keys: float = counts_if_changed(
        "share of each head's key features, the last ones, that are taken from the previous token; "
        "with a rotation of the other features, one layer finds what followed an earlier token "
        "(partial key offset, KellerJordan/modded-nanogpt#169)",
        0.0,
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _sinks_need_a_window(self):
        if self.sinks and self.window is None:
            raise ValueError(
                f"sinks = {self.sinks} requires a window; set window, or set sinks to 0"
            )
        return self

    @property
    def max_visible(self) -> int | None:
        """The largest number of keys that a query attends to; None: unlimited."""
        return None if self.window is None else self.window + self.sinks

    def reduced(self, length: int, original_length: int) -> PositionSettings:
        """Settings with the same result for `length` tokens, without settings that have no effect
        at that length."""
        if self.window is None or self.window + self.sinks < length:
            return self
        return self.model_copy(update={"window": None, "sinks": 0})

    def describe(self, length: int, original_length: int) -> str:
        """The name and the test-time settings that differ from their defaults, e.g. `rope, yarn
        factor 4 (auto), window 256`. Factors that are `auto` are computed for a sequence of
        `length` tokens."""
        fields = type(self).model_fields
        own = [key for key in fields if key not in PositionSettings.model_fields]
        parts = [self.name]
        for key in [*own, "temperature"]:
            value = getattr(self, key)
            default = fields[key].get_default(call_default_factory=True)
            if key not in self.test_time or value == default:
                continue
            if hasattr(value, "describe"):
                parts.append(value.describe(length, original_length))
            elif value == "auto":
                parts.append(f"{key} factor {max(1.0, length / original_length):g} (auto)")
            else:
                number = f"{value:g}" if type(value) is float else str(value)
                parts.append(key if value is True else f"{key} {number}")
        if self.window is not None:
            parts.append(f"window {self.window}")
            if self.sinks:
                parts.append(f"{self.sinks} sink{'s' if self.sinks > 1 else ''}")
        return ", ".join(parts)


class Modifiers(nn.Module):
    """Temperature, sink and weights of one layer, for any scheme."""

    projections: ClassVar[tuple[str, ...]] = ("adaptive",)  # as in a PositionalScheme

    def __init__(self, settings: PositionSettings, heads: int, dim: int):
        super().__init__()
        self.settings = settings
        self._heads = heads
        temperature = settings.temperature
        self.scale = self.adaptive = self.sink = None
        if isinstance(temperature, AdaptiveTemperature):
            self.adaptive = nn.Parameter(torch.empty(2, temperature.adapted(heads), dim))
        elif temperature.learned:
            self.scale = nn.Parameter(torch.empty(heads))
        if settings.sink_logit == "learned":
            self.sink = nn.Parameter(torch.empty(heads))
        given = temperature.by_head
        if given is not None and len(given) != heads:
            raise ModelError(
                f"model.position.temperature.value must have one factor per head ({heads}), got "
                f"{len(given)}"
            )

    def initialize(self) -> None:
        with torch.no_grad():
            if self.scale is not None:
                self.scale.fill_(self.settings.temperature.initial)
            for weight in (self.adaptive, self.sink):
                if weight is not None:
                    weight.zero_()

    def scale_queries(self, q: Tensor, factors: Tensor | None, x: Tensor) -> Tensor:
        """q (B, H, K, ·) times the temperature; `factors` (B or 1, H or 1, K or 1) are per
        query, and x (B, K, C) the layer inputs."""
        if self.scale is not None:
            q = q * self.scale[:, None, None].to(q.dtype)
        if self.adaptive is not None:
            assert factors is not None
            temperature = self.settings.temperature
            assert isinstance(temperature, AdaptiveTemperature)
            factors = temperature.adapt(factors, x, self.adaptive, self._heads)
        return q if factors is None else (q * factors[..., None]).to(q.dtype)

    def normalizer(self, device: torch.device) -> Normalizer:
        """The function from logits to weights."""
        sink = self.sink
        if self.settings.sink_logit == "zero":
            sink = torch.zeros(self._heads, device=device)
        return Normalizer(sink, is_sparse=self.settings.weights == "entmax")


class SharableSettings(PositionSettings):
    """Settings of schemes whose parameters all layers can share."""

    shared: bool = setting(False, "share the learned parameters between all layers")

    @property
    def per_layer(self):
        return not self.shared


# (shape, generator) -> initial values of a parameter
Initializer = Callable[[torch.Size, torch.Generator], Tensor]


def normal(std: float) -> Initializer:
    """N(0, std²)."""
    return lambda shape, generator: torch.randn(shape, generator=generator) * std


def uniform(low: float, high: float) -> Initializer:
    """U(low, high)."""
    return lambda shape, generator: low + (high - low) * torch.rand(shape, generator=generator)


def constant(value: float | Tensor) -> Initializer:
    """One number, or the given tensor."""
    return lambda shape, generator: torch.as_tensor(value).expand(shape)


class PositionalScheme(nn.Module):
    """Base class of positional schemes. It implements NoPE: order comes from the causal mask alone.

    Kazemnejad et al. 2023 (arXiv:2305.19466); Haviv et al. 2022 (arXiv:2203.16634).
    """

    cached_form: ClassVar[str] = "plain keys"  # form in which keys are cached
    supports_fractions: bool = True  # accepts real-valued positions
    fractions_hint: ClassVar[str] = "use integer positions"
    uses_position: ClassVar[bool] = True  # False: the scheme ignores positions
    reads_features: ClassVar[bool] = False  # logits depend on features of q and k, not on q·k alone
    # one past the last position that the scheme can represent; None: unlimited
    limit: int | None = None
    projections: ClassVar[tuple[str, ...]] = ()  # parameters whose input is as wide as the model
    depends_on_length: bool = False  # whether the declared sequence length changes the encoding
    # Conformance checks that do not apply to this scheme: {check: reason}.
    exempt: ClassVar[dict[str, str]] = {}

    settings: Any  # PositionSettings; subclasses declare their own

    def __init__(self, settings: PositionSettings, geometry: HeadGeometry):
        super().__init__()
        self.settings = settings
        self.geometry = geometry
        self._initializers: list[Initializer] = []
        self._constants: list[tuple[Constant, bool]] = []
        self.setup()

    def setup(self) -> None:
        """Create parameters and tables, and check the settings against the geometry."""

    def learned(
        self,
        shape: tuple[int, ...],
        initializer: Initializer,
    ) -> nn.Parameter:
        """A parameter, to be assigned to an attribute; `initialize` draws them in this order."""
        self._initializers.append(initializer)
        return nn.Parameter(torch.empty(shape))

    def constant_table(self, values: Tensor, keep_dtype: bool = False) -> None:
        """Make `values` one of `tables`, in the dtype of the other tables unless `keep_dtype`."""
        self._constants.append((Constant(values), keep_dtype))

    @property
    def key_features(self) -> int:
        """Size of a cached key per key/value head."""
        return self.geometry.head_dim

    @torch.no_grad()
    def initialize(
        self,
        generator: torch.Generator,
        embedding_std: float,
    ) -> None:
        """Initialize the parameters; `embedding_std` is the standard deviation of token
        embeddings."""
        parameters = self.parameters(recurse=False)
        for parameter, initializer in zip(parameters, self._initializers, strict=True):
            parameter.copy_(initializer(parameter.shape, generator))

    def tables(
        self,
        positions: TokenPositions,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        """Tables for the new tokens of a pass, each (B or 1, T, ...), and those of
        `constant_table`.

        Runs eagerly, outside compiled regions: grow tables here, and resolve factors that depend on
        the declared length.

        Args:
            dtype: float64 for float64 models, otherwise float32.
        """
        return tuple(
            values.to(positions.device, None if keep_dtype else dtype)
            for values, keep_dtype in self._constants
        )

    def embed(
        self,
        x: Tensor,
        tables: tuple[Tensor, ...],
        positions: TokenPositions,
    ) -> Tensor:
        """Add positions to the token embeddings (B, T, C) before the first layer."""
        return x

    def plan(self, context: AttentionContext) -> AttentionPlan | ContentPlan:
        """The attention plan of this pass."""
        return AttentionPlan.from_mask(context.mask())

    def check(self, positions: TokenPositions) -> None:
        """Raise ModelError for positions at or beyond the scheme's limit, or unsupported real
        positions."""
        if self.limit is not None and positions.position_end > self.limit:
            raise ModelError(
                f"position scheme '{self.settings.name}' has {self.limit} positions, and the "
                f"input needs {positions.position_end}: shorten the input to {self.limit} tokens"
            )
        if positions.position.is_floating_point() and not self.supports_fractions:
            raise ModelError(
                f"position scheme '{self.settings.name}' does not support real-valued positions; "
                f"{self.fractions_hint}"
            )


class TabulatedScheme(PositionalScheme):
    """A scheme whose tables have one row for each position 0, 1, 2, ..."""

    def __init__(self, settings: PositionSettings, geometry: HeadGeometry):
        super().__init__(settings, geometry)
        self._table = LookupTable(self.rows)

    @abstractmethod
    def rows(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Rows (..., ·) in float64 for positions (...) in float64."""

    def tables(self, positions, dtype):
        return self._table.look_up(positions.position, positions.position_end, dtype)


class ContentScheme(PositionalScheme):
    """A scheme that reads the layer input and caches extras for each token.

    Its methods run in float32 or float64. `tables` are those of the new tokens.
    """

    caches_extras: ClassVar[bool] = True  # False: `read` gets the extras of the new tokens only

    @abstractmethod
    def features(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        """Features (B, T, F) of the new tokens x (B, T, C), each independent of other tokens."""

    def accumulate(
        self,
        features: Tensor,
        past: Tensor | None,
        new: TokenPositions,
        tables: tuple[Tensor, ...],
    ) -> Tensor:
        """Extras (B, T, E) of tokens from their features and the extras of the tokens before: by
        default, the features."""
        return features

    @abstractmethod
    def read(
        self,
        q: Tensor,
        k: Tensor,
        own: Tensor,
        extras: Tensor,
        plan: ContentPlan,
    ) -> list[AttentionView]:
        """The attention views of queries (B, H, K, D), cached keys (B, G, S, ·), and the extras of
        the queries' tokens (B, K, E) and of all keys (B, S, E)."""

    def write(
        self,
        k: Tensor,
        extras: Tensor,
        tables: tuple[Tensor, ...],
    ) -> Tensor:
        """New keys (B, G, T, D), with their extras, in the form in which they are cached."""
        return k

    def plan(self, context):
        return ContentPlan(self, context, context.mask())


@dataclass(frozen=True)
class ContentPlan:
    """The plan of a content scheme before the layer input is known; `mask` has no bias."""

    scheme: ContentScheme
    context: AttentionContext
    mask: AttentionMask
    is_uniform = False

    @property
    def is_unordered(self) -> bool:
        """See `AttentionPlan`."""
        return not self.scheme.settings.reads_between

    def bind(self, x: Tensor, layer_cache: ExtrasCache | None) -> AttentionPlan:
        """The plan for the layer input x (B, T, C)."""
        scheme = self.scheme
        tables = self.context.tables
        accumulate = partial(scheme.accumulate, tables=tables)
        with no_autocast(x):
            features = scheme.features(precise(x), tables)
            if layer_cache is None or not scheme.caches_extras:
                own = extras = accumulate(features, None, self.context.new)
            else:
                own, extras = layer_cache.extend_extras(features, accumulate, self.context.new)
        of_queries = self.context.of_queries(own)
        return AttentionPlan(
            read=lambda q, k: scheme.read(q, k, of_queries, extras, self),
            write=lambda k: scheme.write(k, own, tables),
        )
