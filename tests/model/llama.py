"""A model's weights in transformers' Llama."""

from transformers import LlamaConfig, LlamaForCausalLM

from model import Transformer

NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.w": "self_attn.",
    "mlp.": "mlp.",
}


def their_name(ours: str) -> str:
    if ours in NAMES:
        return NAMES[ours]
    _, index, rest = ours.split(".", 2)
    if rest.startswith("attention.w"):
        rest = f"self_attn.{rest[len('attention.w')]}_proj.weight"
    elif rest.startswith("mlp."):
        rest = f"mlp.{rest.split('.')[1]}_proj.weight"
    else:
        rest = f"{NAMES[rest.split('.')[0]]}.weight"
    return f"model.layers.{index}.{rest}"


def as_llama(model: Transformer, **config) -> LlamaForCausalLM:
    """A copy of a model with RoPE; `config` adds to its sizes."""
    s = model.settings
    sizes = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=s.dim,
        intermediate_size=s.ffn_dim,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        max_position_embeddings=model.train_length,
        rms_norm_eps=s.norm_eps,
        tie_word_embeddings=s.tie_embeddings,
        **config,
    )
    llama = LlamaForCausalLM(sizes).eval()
    weights = {their_name(name): weight for name, weight in model.named_parameters()}
    missing, unexpected = llama.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if s.tie_embeddings else set())
    return llama
