"""Ranks that save and load through torch.distributed.checkpoint: FSDP2 where there are several, a plain model where there is one.

Arguments: store URL, run id, and words: a number saves that step (after training one), ``async`` makes the next save asynchronous, ``load`` loads the
newest, ``die`` has rank 1 killed in the next save. Rank 0 prints a digest of all that was saved or loaded.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchrelay import RelayReader, RelayWriter

__all__ = ["Trained", "digest"]


class Trained:
    """A model of uneven sizes with its optimizer, divided over the ranks if there are several."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(nn.Linear(5, 131), nn.BatchNorm1d(131), nn.Linear(131, 7, bias=False))
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.train(0)

    def train(self, step: int) -> None:
        """Do a step."""
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def state(self, epoch: int) -> dict[str, Any]:
        """The state dict that is saved, or loaded into."""
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": self.model.state_dict(), "optimizer": optimizer, "epoch": epoch}

    def take(self, state: dict[str, Any]) -> None:
        """Take back what was loaded."""
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])


class _Dying(dcp.DefaultSavePlanner):
    """Rank 1 dies when it is asked for its first tensor: rank 0's shard is written, its own is not."""

    def resolve_data(self, write_item: Any) -> torch.Tensor | io.BytesIO:
        """Give a tensor, or die."""
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def digest(value: Any) -> str:
    """SHA-256 over all that a state dict holds, gathered; every rank takes part."""
    whole = hashlib.sha256()
    for name, leaf in sorted(_leaves(value, "")):
        whole.update(f"{name} {leaf}".encode())
    return whole.hexdigest()


def _leaves(value: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}/{key}")]
    if isinstance(value, list):
        return [leaf for index, item in enumerate(value) for leaf in _leaves(item, f"{path}/{index}")]
    if isinstance(value, torch.Tensor):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        return [(path, f"{tuple(full.shape)} {full.reshape(-1).view(torch.uint8).numpy().tobytes().hex()}")]
    return [(path, repr(value))]


def main(store: str, run: str, *words: str) -> None:
    """Do what the words say."""
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    trained, writer = Trained(seed=1 if "load" in words else 0), RelayWriter(store, run=run)
    planner: dcp.SavePlanner | None = None
    later = False
    for word in words:
        if word == "load":
            state = trained.state(0)
            dcp.load(state, storage_reader=RelayReader(store, run=run))
            trained.take(state)
            print("loaded", digest(trained.state(state["epoch"])), flush=True)
        elif word == "die":
            planner = _Dying()
        elif word == "async":
            later = True
        else:
            trained.train(int(word))
            state = trained.state(int(word))
            said = digest(state)
            if dist.is_initialized() and dist.get_rank() == 1:
                state["own"] = {"rank": 1}
            if later:
                future: Any = dcp.async_save(state, storage_writer=writer, checkpoint_id=word)
                future.result()
            else:
                dcp.save(state, storage_writer=writer, checkpoint_id=word, planner=planner)
            print("saved", said, flush=True)
            later = False
    if "async" in words:
        os._exit(0)  # torch 2.13 with any writer: gloo's threads of async_save may abort a process that ends in order
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
