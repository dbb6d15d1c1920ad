"""A job that takes milliseconds per step and has everything that can go wrong on resume: ``torchrelay.testing.tiny:build``.

Dropout, a schedule, an EMA, and a dataset whose augmentation draws from all three global generators. Its failures are data: the option
``fail_at`` says which rank fails, where, when and how; a flag file makes it fail once.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrelay.data.dataset import DatasetVersion
from torchrelay.jobs.job import Job, JobContext

__all__ = ["build", "fail_at"]

_SAMPLES = 100


def fail_at(rank: int, step: int, *, how: str = "kill", where: str = "step", flag: str | Path = "") -> dict[str, Any]:
    """Return the option that makes the job fail.

    ``where``: in the step after ``step`` steps are done, in the first "save" of that step or a later one (a save is left out while one is under way),
    or in the next "load" of any checkpoint. ``how``: kill, raise, memory, exit, hang. With ``flag`` it fails only if that file does not exist, and
    makes it first; without, it fails each time.
    """
    return {"rank": rank, "step": step, "how": how, "where": where, "flag": str(flag)}


class _Samples:
    """Points on a curve, shifted and scaled at random each time they are read."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.01 * random.random() + 0.01 * float(np.random.rand()) + 0.01 * torch.rand(8)
        point = torch.arange(8) * 0.1 + index / _SAMPLES
        return point + noise, torch.sin(3 * point.sum()).reshape(1)


class _Fuse:
    """Fails where and when it was told to; rides along in the training state as a component."""

    def __init__(
        self, plan: Mapping[str, Any] | None, rank: int, scheduler: torch.optim.lr_scheduler.LRScheduler
    ) -> None:
        self._plan, self._rank, self._scheduler = plan, rank, scheduler

    def state_dict(self) -> dict[str, Any]:
        self.check("save")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check("load")

    def check(self, where: str) -> None:
        plan = self._plan
        if plan is None or plan["rank"] != self._rank or plan.get("where", "step") != where:
            return
        step = self._scheduler.last_epoch
        if (where == "step" and step != plan["step"]) or (where == "save" and step < plan["step"]):
            return
        if plan.get("flag"):
            try:
                Path(plan["flag"]).touch(exist_ok=False)
            except FileExistsError:
                return
        _fail(plan["how"])


def _fail(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise ValueError("a bad batch, as ordered")
    elif how == "memory":
        raise MemoryError("no memory, as ordered")
    elif how == "exit":
        os._exit(7)
    elif how == "hang":
        _hang()
    else:
        raise ValueError(f"unknown way to fail: {how!r}")


def _hang() -> None:
    """Wait for ever, as a rank in a lost collective does."""
    while True:
        signal.pause()


def build(context: JobContext) -> Job:
    """Build the job.

    Options: ``sleep_s`` per step, ``fail_at`` (see there), ``width`` of the network, ``dropout``, and ``odd``, which puts an object into the state
    that has no encoding.
    """
    options = context.options
    width = int(options.get("width", 32))
    model = nn.Sequential(
        nn.Linear(8, width),
        nn.Dropout(float(options.get("dropout", 0.1))),
        nn.GELU(),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.Linear(width, 1),
    )
    model.to(context.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, context.total_steps)
    ema = copy.deepcopy(model)
    fuse = _Fuse(options.get("fail_at"), context.rank, scheduler)
    sleep_s = float(options.get("sleep_s", 0.0))

    def loss(trained: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        fuse.check("step")
        if sleep_s:
            time.sleep(sleep_s)
        return nn.functional.mse_loss(trained(batch[0]), batch[1])

    def update_ema() -> None:
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)

    class _Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"open": print}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError

    extra: dict[str, Any] = {"fuse": fuse, **({"odd": _Odd()} if options.get("odd") else {})}
    return Job(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        dataset=_Samples(),
        dataset_version=DatasetVersion("tiny", "7" * 64, _SAMPLES),
        loss=loss,
        ema=ema,
        update_ema=update_ema,
        extra=extra,
        max_grad_norm=1.0,
        sample=lambda trained: f"{sum(p.numel() for p in trained.parameters())} parameters",
    )
