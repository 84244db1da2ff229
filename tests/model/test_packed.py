"""Single-token passes on joined, transposed weights, with every setting of a block."""

from __future__ import annotations

import copy

import pytest
import torch

from model import Cache, TokenPositions, Transformer
from tests.model.zoo import build, close, ids, randomized

LENGTH = 9
BLOCKS = [
    {},
    {"norm_placement": "output"},
    {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logit_softcap": 5.0},
    {"attention_bias": "all", "mlp_bias": True, "residual_multiplier": 0.7},
    {"attention_bias": "qkv", "qk_norm": "all_heads"},
    {"attention_bias": "all", "mlp_bias": True, "norm_placement": "output"},
    {"tie_embeddings": True},
]


@torch.no_grad()
def decoded(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of all tokens, one pass each."""
    positions = TokenPositions.plain(LENGTH)
    cache = Cache(model, len(tokens), LENGTH)
    passes = [positions.part(i, i + 1, position_end=i + 1) for i in range(LENGTH)]
    return torch.cat(
        [model(tokens[:, i : i + 1], one, cache=cache) for i, one in enumerate(passes)], dim=1
    )


@pytest.mark.parametrize("settings", BLOCKS, ids=str)
def test_packed_model_decodes_as_a_full_pass(settings):
    model = randomized(build("rope", **settings))
    tokens = ids(2, LENGTH)
    with torch.no_grad():
        whole = model(tokens, TokenPositions.plain(LENGTH))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    close(decoded(model.pack(), tokens), whole)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_weights_loaded_after_packing_are_used():
    model = build("rope").pack()
    other = randomized(build("rope", seed=4))
    tokens = ids(2, LENGTH)
    model.load_state_dict(other.state_dict())
    close(decoded(model, tokens), decoded(other, tokens))


def test_casting_undoes_packing():
    model = build("rope").pack()
    tokens = ids(2, LENGTH)
    expected = decoded(model, tokens)
    model.float()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.down.weight.zero_()
    assert not torch.allclose(decoded(model, tokens).double(), expected, atol=1e-3)


def test_weights_loaded_into_a_copy_of_a_packed_model_are_used():
    model = build("rope").pack()
    other = randomized(build("rope", seed=4))
    tokens = ids(2, LENGTH)
    model = copy.deepcopy(model)
    model.load_state_dict(other.state_dict())
    close(decoded(model, tokens), decoded(other, tokens))


def test_packed_models_with_the_same_parameters_share_their_storage():
    first = build("rope").pack()
    other = randomized(build("rope", seed=4))
    tokens = ids(2, LENGTH)
    addresses = [weight.data_ptr() for weight in first.parameters()]
    second = copy.deepcopy(first, {id(weight): weight for weight in first.parameters()}).pack()
    assert [weight.data_ptr() for weight in second.parameters()] == addresses
    second.load_state_dict(other.state_dict())
    for model in (first, second):
        close(decoded(model, tokens), decoded(other, tokens))
