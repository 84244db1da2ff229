"""The torch release whose internals these tests patch, models for a GPU's kernels, and their
gradients."""

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module

import model.attention.kernels as kernels
import model.mixers.softmax
from model import TokenPositions, Transformer
from model.attention.kernels import attend
from tests.model.zoo import CASES, build, packed

PATCHED = "2.13"

needs_patched_torch = pytest.mark.skipif(
    torch.__version__.split("+")[0].rsplit(".", 1)[0] != PATCHED,
    reason=f"patches internals of torch {PATCHED}; this is torch {torch.__version__}",
)

flex_tests = [
    needs_patched_torch,
    # Dynamo's own, while it traces the block mask and the score_mod.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

LAYOUTS = {
    "plain": TokenPositions.plain,
    "ragged": lambda length: TokenPositions.left_padded([length, length - 9], length),
    "packed": lambda length: packed([[4, length - 4], [length - 3, 3]]),
}


def choose_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are those of a GPU, and FlexAttention takes gradients on a CPU."""
    choose = kernels.choose
    monkeypatch.setattr(
        kernels, "choose", lambda views, v, normalizer, device: choose(views, v, normalizer, "cuda")
    )
    # raises if torch renames it
    monkeypatch.setattr(flex_module, "_validate_device", lambda q, k, v: None)


def gpu_model(case: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> Transformer:
    """A model of a case with heads of 16 features, the least that FlexAttention takes on a GPU."""
    position = CASES[case]
    if case == "rope-longrope":  # its factors are those of ten rotated features
        position = {**position, "fraction": 0.625}
    return build(position, dtype=dtype, head_dim=16, dim=32, layers=layers)


def gradients(
    net: Transformer,
    tokens: torch.Tensor,
    positions: TokenPositions,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[dict[str, torch.Tensor], int]:
    """(NLL, gradients of block inputs and parameters) by name, and how many attentions ran as
    `kernel`."""
    calls = 0
    inputs = []

    def attended(views, v, scale, normalizer):
        nonlocal calls
        weighs = views[0].weights_fn is not None and not views[0].mask.has_flex_bias
        weighs = weighs or normalizer.is_sparse
        calls += not weighs
        return attend(views, v, scale, "explicit" if weighs else kernel, normalizer)

    def keep_input(block, args):
        if args[0].requires_grad:
            args[0].retain_grad()
        inputs.append(args[0])

    monkeypatch.setattr(model.mixers.softmax, "attend", attended)
    hooks = [block.register_forward_pre_hook(keep_input) for block in net.layers]
    targets = tokens.roll(-1, 1).masked_fill(positions.document.expand_as(tokens) < 0, -100)
    net.zero_grad()
    nll = net(tokens, positions, targets=targets)
    nll.sum().backward()
    for hook in hooks:
        hook.remove()
    leaves = dict(net.named_parameters()) | {f"input {n}": x for n, x in enumerate(inputs)}
    numbers = {name: x.grad.clone() for name, x in leaves.items() if x.grad is not None}
    return {"nll": nll.detach(), **numbers}, calls
