"""The default job: a small GPT that learns to write Python from the standard library's own sources, byte by byte.

The data are on every machine that runs this; their digest names them, so a run refuses to continue on another Python's library. The
model falls from 5.5 to about 2.1 nats per byte within half a minute of one CPU core.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from torchrelay.data.dataset import DatasetVersion
from torchrelay.errors import JobError
from torchrelay.jobs.job import Job, JobContext, read_options

__all__ = ["ByteGPT", "GPTOptions", "SourceWindows", "build"]

_SYMBOLS = 256
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "pydoc_data", "encodings", "idlelib", "__pycache__"}
_PROMPT = b"def "
_SAMPLE_BYTES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTOptions:
    """Options of the job. ``warmup_steps`` = 0 means a twentieth of the run, at most 100 steps."""

    d_model: int = 96
    layers: int = 3
    heads: int = 4
    context: int = 64
    dropout: float = 0.1
    lr: float = 4e-3
    weight_decay: float = 0.1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if min(self.d_model, self.layers, self.heads, self.context) < 1:
            raise ValueError("d_model, layers, heads and context must be at least 1")
        if self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} must be a multiple of heads {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), not {self.dropout}")
        if not (0 < self.lr < math.inf and 0 <= self.weight_decay < math.inf and self.warmup_steps >= 0):  # nan neither
            raise ValueError(
                "lr must be positive, weight_decay and warmup_steps must not be negative; both rates finite"
            )


def build(context: JobContext) -> Job:
    """Build model, optimizer, schedule and data. Raises JobError for options it does not know or cannot use."""
    options = read_options(GPTOptions, context.options)
    dataset = SourceWindows.of_stdlib(options.context)
    model = ByteGPT(options).to(context.device)
    optimizer = torch.optim.AdamW(_decay_groups(model, options.weight_decay), lr=options.lr, betas=(0.9, 0.95))
    return Job(
        model=model,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, _Schedule.of(context.total_steps, options)),
        dataset=dataset,
        dataset_version=dataset.version,
        loss=_loss,
        max_grad_norm=1.0,
        sample=_sample,
    )


class SourceWindows:
    """Overlapping windows of a byte sequence: sample i is uint8 of shape (context + 1,), from byte i * context on."""

    def __init__(self, data: bytes, version: DatasetVersion, context: int) -> None:
        self.version = version
        self._context = context
        self._data = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @classmethod
    def of_stdlib(cls, context: int) -> SourceWindows:
        """Read the sources of the Python that runs this, in the order of their names."""
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = sorted(_sources(root))
        data = b"".join(path.read_bytes() for path in paths)
        if len(data) <= context:
            raise JobError(f"the Python standard library has no sources in {root}", hint="name a job of your own")
        count = (len(data) - 1) // context
        return cls(data, DatasetVersion.of_files("python-stdlib", paths, root=root, num_samples=count), context)

    def __len__(self) -> int:
        return self.version.num_samples

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._context
        return self._data[start : start + self._context + 1]


def _sources(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        # Not even entered: site-packages may hold 100 000 files.
        below[:] = [name for name in below if name not in _SKIPPED]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


class _Block(nn.Module):
    def __init__(self, options: GPTOptions) -> None:
        super().__init__()
        width = options.d_model
        self.heads = options.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv: Tensor = self.qkv(self.norm_1(x))
        q, k, v = qkv.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.out(mixed))
        thought: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))
        return x + thought


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes: int64 (batch, length <= context) to logits (batch, length, 256)."""

    def __init__(self, options: GPTOptions) -> None:
        super().__init__()
        self.context = options.context
        self.symbols = nn.Embedding(_SYMBOLS, options.d_model)
        self.positions = nn.Embedding(options.context, options.d_model)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(_Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.d_model)
        self.head = nn.Linear(options.d_model, _SYMBOLS, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.head.weight = self.symbols.weight  # tied

    def forward(self, symbols: Tensor) -> Tensor:
        """Return the logits of the next byte at each place."""
        places = torch.arange(symbols.shape[1], device=symbols.device)
        x: Tensor = self.dropout(self.symbols(symbols) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)  # no slots: the scheduler keeps the attributes of its function in its state
class _Schedule:
    """Factor of the learning rate: linear warm-up, then a cosine down to a tenth at the end of the run."""

    warmup_steps: int
    total_steps: int

    @classmethod
    def of(cls, total_steps: int, options: GPTOptions) -> _Schedule:
        return cls(options.warmup_steps or min(100, max(1, total_steps // 20)), total_steps)

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay, biases and norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy in nats per byte."""
    symbols = batch.long()
    logits: Tensor = model(symbols[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())


@torch.no_grad()
def _sample(model: nn.Module) -> str:
    """Let the model write a little Python, always the same for the same weights."""
    assert isinstance(model, ByteGPT)
    device = model.symbols.weight.device
    generator = torch.Generator().manual_seed(0)
    written = torch.tensor([list(_PROMPT)], device=device)
    was_training = model.training
    model.eval()
    try:
        for _ in range(_SAMPLE_BYTES):
            logits = model(written[:, -model.context :])[:, -1].float().cpu()
            chosen = torch.multinomial(torch.softmax(logits / 0.8, dim=-1), 1, generator=generator)
            written = torch.cat([written, chosen.to(device)], dim=1)
    finally:
        model.train(was_training)
    return bytes(written[0].tolist()).decode("utf-8", "replace")
