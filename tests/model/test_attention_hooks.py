"""Attention hooks report what the model computed, for every scheme and every kernel it selects."""

import functools

import pytest
import torch

from model import ModelError, TokenPositions
from model.attention.explicit import attention_details
from tests.model.zoo import CASES, T, build, cached, close, every_case, ids, reach_of

LAST = 4


def watched(model, tokens, last=LAST):
    """(NLL-free) logits of the last tokens through a cache, and what every layer's attention
    was."""
    seen = []

    def hook(layer, views, v, scale, sink, out):
        spelled = attention_details(views, v, scale, sink, 0, views[0].mask.queries, logits=True)
        seen.append((layer, views, v, sink, spelled, out))

    reach = tokens.shape[1]
    cache = model.make_cache(tokens.shape[0], reach)
    with torch.no_grad():
        model(
            tokens[:, :-last], TokenPositions.plain(reach - last, length=reach), cache=cache, keep=0
        )
        hooks = [functools.partial(hook, i) for i in range(len(model.layers))]
        positions = TokenPositions.plain(last, offset=reach - last, length=reach)
        logits = model(tokens[:, -last:], positions, cache=cache, hooks=hooks)
    return logits, seen


@every_case
def test_weights_times_values_are_the_output(case):
    model = build(case)
    tokens = ids(2, reach_of(model, T))
    logits, seen = watched(model, tokens)
    close(logits, cached(model, tokens, [tokens.shape[1] - LAST, LAST])[:, -LAST:])
    assert [layer for layer, *_ in seen] == [0, 1, 2]
    for _, views, v, sink, spelled, out in seen:
        weights = spelled.weights
        pairs = views[0].mask
        values = v[:, :, spelled.keys].repeat_interleave(pairs.heads // v.shape[1], dim=1)
        mixed = torch.einsum("bhts,bhsd->bhtd", weights, values)
        if views[0].extra_output is None:
            close(mixed, out)
        close(spelled.output, out)
        assert (weights >= 0).all()
        total = weights.sum(-1)
        if sink is None and CASES[case].get("remainder") != "drop":
            close(total, torch.ones_like(total))
        else:
            assert (total <= 1 + 1e-12).all() and (total > 0).all() and total.min() < 0.999
        # Logits and weights say the same: softmax over the keys that are seen, and over the sink.
        if views[0].weights_fn is None or "stick_breaking" not in case:
            assert spelled.logits is not None
            shares = spelled.logits.softmax(-1) * total[..., None]
            close(shares, weights)


def test_linear_attention_does_not_support_hooks():
    model = build("rope", mixer={"name": "linear"})
    with pytest.raises(ModelError, match="no attention weights"):
        watched(model, ids(1, T))
