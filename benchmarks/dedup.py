"""Bytes uploaded per save, as a share of the state, when most of it has not changed: ``python -m benchmarks.dedup [--quick]``.

Counted in the store: the size of every object that was not there before the save, records and manifests included. Three trainings:
``dense`` (everything changes), ``frozen`` (about 90 % of the bytes do not) and ``lora`` (rank-4 adapters on a frozen model).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.report import Bar, report
from benchmarks.workload import Workload, gpt
from torchrelay import Checkpointer, ObjectStore, TrainingState, open_store

_RANK = 4  # of the adapters


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small state, two saves")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    saves = 2 if args.quick else 5
    kinds: dict[str, tuple[Callable[[Workload], Workload], float]] = {
        "dense": (lambda workload: workload, 1.01),
        "frozen": (_frozen, 0.11),
        "lora": (_lora, 0.02),
    }
    report(
        "dedup",
        [_measure(name, make(gpt(quick=args.quick)), bar, saves) for name, (make, bar) in kinds.items()],
        out=args.out,
    )


def _measure(name: str, workload: Workload, bar: float, saves: int) -> Bar:
    """Bytes of the second save and those after it, each after one training step."""
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"file://{folder}")
        state = TrainingState(model=workload.model, optimizer=workload.optimizer)
        with Checkpointer(state, run="bench", store=store.url) as checkpointer:
            checkpointer.restore()
            for step in range(saves + 1):
                workload.step()
                before = _objects(store)
                checkpointer.save(step + 1).result()
                new = {key: size for key, size in _objects(store).items() if key not in before}
                shares.append(sum(new.values()) / workload.size_bytes)
    changing = _changing(workload)
    bar = bar if saves > 2 else round(changing + 0.01, 4)
    detail = {
        "mib": round(workload.size_bytes / 2**20),
        "changes": round(changing, 4),
        "first": round(shares[0], 4),
    }
    return Bar(
        figure=f"{name}: bytes uploaded / state, second save on",
        value=statistics.median(shares[1:]),
        bar=bar,
        detail=detail,
    )


def _objects(store: ObjectStore) -> dict[str, int]:
    return {item.key: item.size_bytes for item in store.list("").objects}


def _changing(workload: Workload) -> float:
    """Share of the state's bytes that a step changes: trainable parameters and their two moments."""
    trainable = sum(parameter.nbytes for parameter in workload.model.parameters() if parameter.requires_grad)
    return 3 * trainable / workload.size_bytes


def _frozen(workload: Workload) -> Workload:
    """Train only some layers of the last block: about a tenth of the state."""
    blocks = [module for module in workload.model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    last = blocks[-1]
    return _only(workload, [last.linear1.weight, last.self_attn.in_proj_weight])


def _lora(workload: Workload) -> Workload:
    """Freeze the model and train a rank-4 adapter beside each feed-forward layer."""
    blocks = [module for module in workload.model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    trained: list[torch.Tensor] = []
    for block in blocks:
        for name in ("linear1", "linear2"):
            adapted = _Adapted(getattr(block, name))
            setattr(block, name, adapted)
            trained += [adapted.down, adapted.up]
    return _only(workload, trained)


class _Adapted(nn.Module):
    """A frozen linear layer plus a product of two thin matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(_RANK, base.in_features) / base.in_features)
        self.up = nn.Parameter(torch.zeros(base.out_features, _RANK))

    @property
    def weight(self) -> torch.Tensor:
        """What the block looks at when it chooses its kernels."""
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Likewise."""
        return self.base.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Base plus adapter."""
        out: torch.Tensor = self.base(hidden) + hidden @ self.down.T @ self.up.T
        return out


def _only(workload: Workload, trained: list[torch.Tensor]) -> Workload:
    """Train these parameters and no others, with a new optimizer."""
    for parameter in workload.model.parameters():
        parameter.requires_grad_(False)
    for tensor in trained:
        tensor.requires_grad_(True)
    workload.optimizer = torch.optim.AdamW(trained)
    workload.model.zero_grad()
    workload.step()
    return workload


if __name__ == "__main__":
    main()
