"""A small model, its updates, and checkpoints of it that are not a run's."""

from pathlib import Path

import torch
from torch import nn

from run_directory.checkpoints import Checkpoint, save_checkpoint
from run_directory.process_group import ALONE
from run_directory.training_settings import AdamWSettings, StopOnNonFinite
from training.optimizer import Optimizer
from training.step_guard import StepGuard
from training.train_state import TrainState

APPLY = torch.tensor(False)
SKIP = torch.tensor(True)


class Net(nn.Module):
    """Embedding, matrix, bias, norm, a learned position table, and a head that may be tied."""

    def __init__(self, vocabulary: int = 11, dim: int = 6, tie_embeddings: bool = True):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(9, dim)
        self.mix = nn.Linear(dim, dim)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(x + self.mix(x)))


class RecordingConsole:
    """A console that stores its warnings."""

    def __init__(self):
        self.lines = []

    def warn(self, text):
        self.lines.append(text)


def state_of(model, optimizer, step: int = 0, ema=None) -> TrainState:
    guard = StepGuard(StopOnNonFinite(), None, "cpu")
    return TrainState(model, optimizer, guard, ema, forward=model, step=step)


def trained(steps, seed=0, dtype=torch.float32, settings=None) -> TrainState:
    """A net after some updates; the tokens come from the global generator."""
    torch.manual_seed(seed)
    net = Net().to(dtype)
    state = state_of(net, Optimizer(net, settings or AdamWSettings()))
    for _ in range(steps):
        update(state)
    return state


def update(state: TrainState) -> float:
    """One update; its loss shows whether weights, moments and generator were all as before."""
    tokens = torch.randint(11, (3, 5))
    rate = 0.01 + 0.001 * torch.rand(()).item()
    state.optimizer.set_learning_rates({"lr": rate, "adamw_lr": rate})
    logits = state.model(tokens)
    loss = logits.float().logsumexp(-1).mean() - logits[..., 0].mean()
    loss.backward()
    state.optimizer.step(APPLY)
    state.model.zero_grad()
    return loss.item()


def save(folder: Path, step: int, state: TrainState, facts=None, group=ALONE) -> Checkpoint:
    """A checkpoint of a state as that of another step."""
    return save_checkpoint(folder, step, state.capture(), facts, group)
