"""torchrelay in a training loop of your own: the lines marked with `# +` are all that is added.

    python examples/own_loop.py --store file:///tmp/own-loop --steps 300

Stop it however you like (Ctrl-C, kill -9) and run it again: it goes on from the last committed step, with the numbers of a run that
was never stopped.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchrelay import Checkpointer, DatasetVersion, ElasticSampler, TrainingState, elastic_loader


def main() -> None:
    """Fit a small network to a noisy curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="", help="s3://bucket/prefix or file:///folder; default: TORCHRELAY_STORE")
    parser.add_argument("--run", default="own-loop")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.linspace(-3, 3, 2000).unsqueeze(1)
    dataset = TensorDataset(inputs, torch.sin(2 * inputs) + 0.1 * torch.randn_like(inputs))
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.05), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    version = DatasetVersion.of_samples("noisy-sine", dataset)  # +
    sampler = ElasticSampler(version, global_batch=64, seed=0)  # +
    loader: DataLoader[tuple[torch.Tensor, torch.Tensor]] = elastic_loader(dataset, sampler)  # +
    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)  # +
    with Checkpointer(state, run=args.run, store=args.store) as checkpointer:  # +
        restored = checkpointer.restore()  # +
        first = restored.step if restored else 0  # +
        batches = iter(loader)
        for step in range(first, args.steps):
            x, y = next(batches)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            if (step + 1) % 25 == 0:
                print(f"step {step + 1} loss {loss.item():.17g}", flush=True)
                checkpointer.save(step + 1)  # +


if __name__ == "__main__":
    main()
