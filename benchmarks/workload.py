"""Two training states that stress a checkpoint engine in different ways, with real steps to train them.

``gpt`` is 54.7 M parameters with AdamW (626 MiB of float32 in large tensors; its step computes). ``many`` is 500 layers of 256 KiB with AdamW
(1,500 tensors of 256 KiB and 500 counters; its step is bound by Python's dispatch of small kernels, so whatever holds the GIL shows).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["WORKLOADS", "Warm", "Workload", "gpt", "many", "tensors_of"]


@dataclass(kw_only=True)
class Workload:
    """A model, its optimizer and its data. ``step`` is forward, backward, whatever must happen before the update, and the update."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], torch.Tensor]

    def backward(self) -> None:
        """Forward and backward: changes gradients only."""
        self.optimizer.zero_grad(set_to_none=False)
        self.loss().backward()  # type: ignore[no-untyped-call]

    def step(self, join: Callable[[], object] = lambda: None) -> float:
        """One training step; ``join`` is called before the update. Returns its seconds, ``join`` included."""
        began = time.perf_counter()
        self.backward()
        join()
        self.optimizer.step()
        return time.perf_counter() - began

    def state_dict(self) -> dict[str, Any]:
        """What a peer is given to save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors of the state."""
        return sum(tensor.nbytes for tensor in tensors_of(self.state_dict()))


class Warm:
    """The limit: one plain copy of every tensor into buffers whose pages were touched before."""

    def __init__(self, workload: Workload) -> None:
        self._sources = list(tensors_of(workload.state_dict()))
        self._targets = [tensor.detach().clone() for tensor in self._sources]

    def copy_s(self) -> float:
        """Seconds of one copy."""
        began = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)
        return time.perf_counter() - began


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors in a tree of dicts and lists, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        children: Iterable[Any] = tree.values() if isinstance(tree, dict) else tree
        yield from itertools.chain.from_iterable(tensors_of(child) for child in children)


class _Gpt(nn.Module):
    """A plain decoder; the output layer shares the embedding's weights."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        block = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        hidden = self.blocks(self.tokens(tokens) + self.places, mask=self.mask, is_causal=True)
        return nn.functional.linear(hidden, self.tokens.weight)


def gpt(*, quick: bool = False, prepare: Callable[[nn.Module], object] = lambda model: None) -> Workload:
    """54.7 M parameters (5.3 M with ``quick``), a batch of 128 tokens. ``prepare`` may shard the model before its optimizer is made."""
    torch.manual_seed(0)
    vocabulary, width, layers, length = (8192, 256, 4, 32) if quick else (32768, 512, 12, 64)
    model = _Gpt(vocabulary=vocabulary, width=width, layers=layers, length=length)
    prepare(model)
    batch = torch.randint(vocabulary, (2, length + 1))

    def loss() -> torch.Tensor:
        logits = model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return _ready(Workload(name="gpt", model=model, optimizer=torch.optim.AdamW(model.parameters()), loss=loss))


def many(*, quick: bool = False) -> Workload:
    """500 layers of 256 x 256 (60 with ``quick``), one row of data: thousands of small kernels per step."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256, bias=False) for _ in range(60 if quick else 500)]
    model = nn.Sequential(*layers)
    row = torch.randn(1, 256)

    def loss() -> torch.Tensor:
        hidden: torch.Tensor = row
        for layer in layers:
            hidden = hidden + 0.01 * torch.tanh(layer(hidden))
        return hidden.square().mean()

    return _ready(Workload(name="many", model=model, optimizer=torch.optim.AdamW(model.parameters()), loss=loss))


def _ready(workload: Workload) -> Workload:
    """One step, so that the optimizer has its state."""
    workload.step()
    return workload


WORKLOADS: dict[str, Callable[..., Workload]] = {"gpt": gpt, "many": many}
