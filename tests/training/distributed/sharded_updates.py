"""Two processes with sharded weights make the updates of one process with all weights.

Each process calls `compare`.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from model import ModelSettings, TokenPositions, Transformer
from run_directory.optimizer_settings import AdamWSettings, MuonSettings
from training.optim.optimizer import guarded_step, make_optimizer, set_learning_rates


def build():
    return Transformer(ModelSettings(dim=24, layers=1, heads=3, ffn_dim=40), 31, 8).initialize(0)


def update(model, optimizer, tokens, held):
    model(tokens[:, :-1], TokenPositions.plain(8), tokens[:, 1:]).mean().backward()
    guarded_step(optimizer, torch.tensor(held))
    optimizer.zero_grad()


def compare() -> dict[str, tuple[float, float]]:
    """For each optimizer, the largest difference of any weight, and by how much weights have
    moved."""
    dist.init_process_group("gloo")
    found = {}
    mesh = init_device_mesh("cpu", (2,))
    tokens = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(0))
    for settings in (AdamWSettings(lr=0.01), MuonSettings(lr=0.01)):
        whole = build()
        shared = build()
        for block in shared.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(shared, mesh=mesh)
        for model, plan in ((whole, (False, False)), (shared, (False, True, False, True))):
            optimizer = make_optimizer(model, settings)
            set_learning_rates(optimizer, settings.rates)
            for held in plan:
                update(model, optimizer, tokens, held)
        pairs = zip(shared.parameters(), whole.parameters(), strict=True)
        # NaN if any is
        worst = float(np.max([(a.full_tensor() - b).abs().max().item() for a, b in pairs]))
        moved = max(
            (a - b).abs().max().item()
            for a, b in zip(whole.parameters(), build().parameters(), strict=True)
        )
        found[settings.name] = worst, moved
    dist.barrier()  # a rank that exits while another still sends aborts the other
    dist.destroy_process_group()
    return found
