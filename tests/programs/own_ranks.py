"""A user's own training loop under torchrun's environment: DDP, dropout, a schedule; prints each loss exactly, then a digest of the parameters.

Arguments: store URL, run id, steps, save interval, and optionally the step at which rank 1 kills itself.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

from torchrelay.data.dataset import DatasetVersion
from torchrelay.data.sampler import ElasticSampler
from torchrelay.state.capture import TrainingState
from torchrelay.state.checkpointer import Checkpointer
from torchrelay.state.rng import derive_rng


def main(store: str, run: str, steps: int, interval: int, fatal: int = -1) -> None:
    """Train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    derive_rng(1, step=0, rank=0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    sampler = ElasticSampler(DatasetVersion("d", "1" * 64, 40), global_batch=12, seed=5, rank=rank, world_size=world)
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    state = TrainingState(model=ddp, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    with Checkpointer(state, run=run, store=store) as checkpointer:
        restored = checkpointer.restore()
        if restored is None:
            derive_rng(2, step=0, rank=rank)
        first = restored.step if restored else 0
        batches = iter(sampler)
        for step in range(first, steps):
            ids = torch.tensor([int(key) for key in next(batches)], dtype=torch.float32)
            loss = (ddp(torch.sin(ids[:, None] * torch.arange(1, 9))) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if rank == 0:
                print(f"loss {step + 1} {loss.item().hex()}", flush=True)
            if (step + 1) % interval == 0:
                checkpointer.save(step + 1).result(60)
            if rank == 1 and step + 1 == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        print(f"parameters {hashlib.sha256(weights).hexdigest()}")
        print(f"ledger {sampler.state_dict_at(steps)['ledger']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(word) for word in sys.argv[3:]))
