"""One leg of a relay of layouts: restore, print a digest of everything, train a little, save, print the digest again.

Arguments: store URL, run id, layout (single, ddp, zero, fsdp, hsdp, tp), steps to train, and optionally the step before which the state is
changed while a save copies it (a deliberate tear). The run "torn" has a frozen layer so large that its copy takes longer than that.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchrelay.state.capture import TrainingState
from torchrelay.state.checkpointer import Checkpointer


class _Net(nn.Module):
    """Uneven sizes, a tied weight, a frozen layer (large, if wanted), a bf16 and a counting buffer."""

    def __init__(self, *, frozen_rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 14)
        self.down = nn.Linear(14, 6)
        self.coarse = nn.Buffer(torch.linspace(0, 1, 7, dtype=torch.bfloat16))
        self.frozen = nn.Linear(6, frozen_rows).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.seen = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits; counts the tokens it has seen."""
        self.seen.add_(tokens.numel())
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        logits: torch.Tensor = self.head(hidden) + self.coarse.float().sum() + self.frozen(hidden).sum(-1, keepdim=True)
        return logits


def _full(value: Any) -> torch.Tensor:
    full: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over all parameters, buffers and optimizer state, gathered; every rank takes part."""
    parts: dict[str, torch.Tensor] = {f"model.{name}": _full(value) for name, value in model.state_dict().items()}
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank():
            return ""
    state: Mapping[int, Mapping[str, Any]] = optimizer.state_dict()["state"]
    parts |= {f"{index}.{key}": _full(value) for index, each in state.items() for key, value in each.items()}
    whole = hashlib.sha256()
    for name in sorted(parts):
        flat = parts[name].detach().contiguous().reshape(-1)
        whole.update(name.encode() + bytes(flat.view(torch.uint8).numpy() if flat.numel() else b""))
    return whole.hexdigest()


def _build(layout: str, world: int, *, frozen_rows: int) -> tuple[_Net, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _Net(frozen_rows=frozen_rows)
    trained: nn.Module = model
    if layout in ("fsdp", "hsdp"):
        sizes, names = ((world,), ("shard",)) if layout == "fsdp" else ((2, world // 2), ("replica", "shard"))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for part in (model.up, model.down, model.frozen):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        parallelize_module(
            model, init_device_mesh("cpu", (world,)), {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    elif layout in ("ddp", "zero"):
        trained = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    if layout == "zero":
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, trained, optimizer


def main(store: str, run: str, layout: str, steps: int, tear: int = -1) -> None:
    """Run one leg."""
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if layout != "single":
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, trained, optimizer = _build(layout, world, frozen_rows=2**22 if run == "torn" else 6)
    with Checkpointer(TrainingState(model=model, optimizer=optimizer), run=run, store=store) as checkpointer:
        restored = checkpointer.restore()
        first = restored.step if restored else 0
        _say(rank, "restored", _digest(model, optimizer) if restored else "nothing")
        assert model.head.weight is model.embed.weight, "the tie is gone"
        for step in range(first, first + steps):
            tokens = torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(step))
            loss = trained(tokens).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if step == tear:
                pending = checkpointer.save(step)
                _change(optimizer)  # not in a step: nothing waits for the copy
                try:
                    pending.result(60)
                    _say(rank, "torn", "accepted")
                except Exception as error:
                    _say(rank, "torn", type(error).__name__)
            optimizer.step()
            _say(rank, f"loss {step}", loss.item().hex())
        checkpointer.save(first + steps).result(60)
        _say(rank, "saved", _digest(model, optimizer))
    if dist.is_initialized():
        dist.destroy_process_group()


def _change(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for state in optimizer.state.values():
            for value in state.values():
                value.add_(1)


def _say(rank: int, name: str, value: str) -> None:
    if rank == 0:
        print(name, value, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *(int(word) for word in sys.argv[4:]))
