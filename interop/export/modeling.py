"""transformers classes around our decoder: the handwritten part of an exported modeling file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

from model.cache import Cache
from model.model_settings import ModelSettings
from model.token_positions import TokenPositions
from model.transformer import Transformer

# Names by which other tools read sizes.
NAMES = {
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
}
FIRST_CAPACITY = 256  # tokens of a cache whose final length is unknown; doubled as needed


class SextantConfig(PreTrainedConfig):
    """Configuration of an exported model.

    Attributes:
        settings: sizes and positional schemes, with every value.
        vocab_size: V.
        train_length: trained length in tokens.
        original_length: reference length of scaling methods.
    """

    model_type = "sextant"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        settings: dict[str, Any] | None = None,
        vocab_size: int = 0,
        train_length: int = 0,
        original_length: int = 0,
        **kwargs,
    ):
        self.settings = settings or {}
        self.vocab_size = vocab_size
        self.train_length = train_length
        self.original_length = original_length
        self.max_position_embeddings = train_length
        for name, ours in NAMES.items():
            setattr(self, name, self.settings.get(ours))
        super().__init__(**kwargs)


class SextantCache(cache_utils.Cache):
    """Keys and values of the tokens so far (for linear attention, sums), and a mask of padding
    tokens.

    Args:
        model: the model to cache.
        final_length: number of tokens of each row at the end of the generation, padding included;
            None: unknown. Required by schemes whose encoding depends on the sequence length.
    """

    def __init__(
        self,
        model: SextantForCausalLM,
        final_length: int | None = None,
    ):
        super().__init__(layers=[])
        self.final_length = final_length
        self._model = model.model
        self._cache = None
        self.is_padded = False

    @property
    def is_compileable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens so far, padding included."""
        return 0 if self._cache is None else self._cache.filled

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The longest input; −1: unlimited."""
        return self._model.limit or -1

    def for_pass(self, batch: int, tokens: int) -> Cache:
        """The cache, with space for `tokens` more tokens."""
        needed = self.get_seq_length() + tokens
        if self._cache is None:
            self._cache = self._model.make_cache(
                batch, max(self.final_length or FIRST_CAPACITY, needed)
            )
        elif needed > self._cache.capacity:
            self._cache.grow(max(needed, 2 * self._cache.capacity))
        return self._cache

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows, for beam search."""
        if self._cache is not None:
            self._cache.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._cache is not None:
            self._cache.select_rows(torch.arange(self._cache.batch).repeat_interleave(repeats))

    def reset(self) -> None:
        self._cache = None
        self.is_padded = False

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("tokens cannot be removed from this cache: start again with another one")


class SextantForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder whose positional scheme no class of transformers implements."""

    config_class = SextantConfig
    main_input_name = "input_ids"
    _is_stateful = True  # no assisted generation: tokens cannot be removed from the cache
    _supports_sdpa = True
    _input_embed_layer = "embed"

    def __init__(self, config: SextantConfig):
        super().__init__(config)
        settings = ModelSettings.model_validate(config.settings)
        # transformers creates models on the meta device; tables need values
        with torch.device("cpu"):
            self.model = Transformer(
                settings, config.vocab_size, config.train_length, config.original_length
            )
        self.post_init()

    def new_cache(self, final_length: int | None = None) -> SextantCache:
        """An empty cache; see SextantCache."""
        return SextantCache(self, final_length)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = self.new_cache(max_cache_length + 1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SextantCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits (B, K, V), and the loss with labels.

        Args:
            input_ids: (B, T) new tokens.
            attention_mask: (B, tokens so far + T), 0 for padding at the start or end of a row.
            position_ids: (B, T); must equal the positions that follow from attention_mask.
            past_key_values: the cache of the preceding tokens. Passes with a cache require
                torch.no_grad().
            labels: (B, T) the input ids, or −100 to exclude a token from the loss.
            use_cache: create a cache if none is passed.
            logits_to_keep: number of last tokens, or tensor of indices, whose logits are returned;
                0: all tokens.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("this model requires input_ids; inputs_embeds are not supported")
        for name in ("output_attentions", "output_hidden_states"):
            if kwargs.get(name):
                raise ValueError(f"{name} is not supported by this model")
        if past_key_values is None and use_cache and not torch.is_grad_enabled():
            past_key_values = self.new_cache()
        if past_key_values is not None and not isinstance(past_key_values, SextantCache):
            raise ValueError(
                f"past_key_values must be a SextantCache, got {type(past_key_values).__name__}; "
                f"pass none"
            )
        batch, tokens = input_ids.shape
        positions = self._positions(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
        )
        cache = None if past_key_values is None else past_key_values.for_pass(batch, tokens)
        last = logits_to_keep if isinstance(logits_to_keep, int) and labels is None else 0
        logits = self.model(
            input_ids,
            positions,
            cache=cache,
            keep=min(last, tokens) or None,
        )
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits,
                labels,
                vocab_size=self.config.vocab_size,
                **kwargs,
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
        )

    def _positions(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: SextantCache | None,
    ) -> TokenPositions:
        """The positions of the new tokens: rows begin at the first token that is not masked."""
        (batch, tokens), device = input_ids.shape, input_ids.device
        start = 0 if cache is None else cache.get_seq_length()
        end = start + tokens
        final = end if cache is None or cache.final_length is None else max(cache.final_length, end)
        if attention_mask is not None and attention_mask.shape != (batch, end):
            raise ValueError(
                f"attention_mask must have the shape {(batch, end)}, got "
                f"{tuple(attention_mask.shape)}"
            )
        if start == 0:
            is_padded = attention_mask is not None and not bool(attention_mask.all())
            if cache is not None:
                cache.is_padded = is_padded
        else:
            assert cache is not None
            is_padded = cache.is_padded
        if not is_padded:
            positions = TokenPositions.plain(
                tokens,
                offset=start,
                length=final,
                device=device,
            )
        else:
            if attention_mask is None:
                raise ValueError(
                    "the preceding tokens contain padding: pass their attention_mask too"
                )
            seen = attention_mask.bool()
            padding = seen.int().argmax(1, keepdim=True)  # (B, 1) slots before the first token
            order = torch.arange(end, device=device)[None] - padding
            if cache is not None and ((order >= 0) & ~seen).any():
                raise ValueError("with a cache, padding must be at the start of each row")
            positions = TokenPositions(
                order=order[:, start:],
                position=order[:, start:].clamp(min=0),
                document=torch.where(seen & (order >= 0), 0, -1)[:, start:],
                layout="ragged",
                position_end=end,
                lengths=tuple(final - count for count in padding[:, 0].tolist()),
            )
        if position_ids is not None:
            is_token = positions.document >= 0
            if not torch.equal(
                position_ids.expand(batch, -1)[is_token.expand(batch, -1)],
                positions.position.expand(batch, -1)[is_token.expand(batch, -1)],
            ):
                raise ValueError(
                    "position_ids other than those of attention_mask are not supported"
                )
        return positions
