"""The default job: it learns, it writes, its data have a name, and its options are checked."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.data.loader import elastic_loader
from torchrelay.data.sampler import ElasticSampler
from torchrelay.errors import JobError
from torchrelay.jobs.job import Job, JobContext, build_job
from torchrelay.jobs.stdlib_gpt import _SKIPPED, SourceWindows

_TARGET = "torchrelay.jobs.stdlib_gpt:build"


def _build(**options: Any) -> Job:
    random.seed(0)
    torch.manual_seed(0)
    context = JobContext(options=options, total_steps=60, global_batch=16, seed=0, device="cpu", rank=0, world_size=1)
    return build_job(_TARGET, context)


def test_it_learns() -> None:
    """From the 5.5 nats per byte of a guess to clearly below the 3.4 of single byte frequencies, in 60 steps of a narrow model."""
    job = _build(d_model=48, layers=2)
    sampler = ElasticSampler(job.dataset_version, global_batch=16, seed=0)
    losses = []
    for _, batch in zip(range(60), elastic_loader(job.dataset, sampler), strict=False):
        loss = job.loss(job.model, batch)
        job.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        job.optimizer.step()
        assert job.scheduler is not None
        job.scheduler.step()
        losses.append(float(loss.detach()))
    assert 5.2 < losses[0] < 5.8
    assert sum(losses[-10:]) / 10 < 3.2


@pytest.mark.parametrize("training", [True, False])
def test_it_writes_the_same_for_the_same_weights_and_disturbs_nothing(training: bool) -> None:
    """Generators, training mode and weights are as before; the text begins with the prompt."""

    def state() -> tuple[Any, ...]:
        modes = [module.training for module in job.model.modules()]
        weights = [value.clone() for value in job.model.state_dict().values()]
        return random.getstate(), torch.get_rng_state().tolist(), modes, [value.tolist() for value in weights]

    job = _build(d_model=16, layers=1, context=16, dropout=0.5)
    assert job.sample is not None
    job.model.train(training)
    before = state()
    text = job.sample(job.model)
    assert text.startswith("def ")
    assert text == job.sample(job.model)
    assert state() == before
    assert job.model.training is training


def test_training_mode_comes_back_after_a_failure() -> None:
    """A model that cannot write may still be trained."""
    job = _build(d_model=16, layers=1)
    assert job.sample is not None
    before = torch.get_rng_state()
    job.model.get_submodule("norm").register_forward_hook(_refuse)
    with pytest.raises(RuntimeError, match="refused"):
        job.sample(job.model)
    assert job.model.training
    assert torch.equal(torch.get_rng_state(), before)


def _refuse(*_: object) -> None:
    raise RuntimeError("refused")


@pytest.mark.parametrize("context", [1, 31, 64])
def test_its_samples_cover_the_text_without_gaps(context: int) -> None:
    """Each begins with the byte that the one before ended with, and the last is whole."""
    windows = SourceWindows.of_stdlib(context)
    places = [0, 1, 2, len(windows) - 2, len(windows) - 1]
    shown = [windows[place] for place in places]
    assert all(window.shape == (context + 1,) and window.dtype == torch.uint8 for window in shown)
    assert shown[0][-1] == shown[1][0]
    assert shown[-2][-1] == shown[-1][0]
    assert len(windows) == windows.version.num_samples


def test_its_text_is_in_the_order_of_names() -> None:
    """The digest does not cover the order of the files, so it must be the same on every machine, whatever its folders list first."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))
    text = b"".join(path.read_bytes() for path in names)
    windows = SourceWindows.of_stdlib(1024)
    assert len(windows) == (len(text) - 1) // 1024
    shown = b"".join(bytes(windows[place][:-1].tolist()) for place in range(0, len(windows), 97))
    assert shown == b"".join(text[place * 1024 : (place + 1) * 1024] for place in range(0, len(windows), 97))


def test_no_place_sees_what_comes_after_it() -> None:
    """Otherwise its loss would fall for the wrong reason."""
    model = _build(d_model=16, layers=2, context=12).model.eval()
    symbols = torch.arange(12).unsqueeze(0)
    changed = symbols.clone()
    changed[0, 7:] += 100
    one, two = model(symbols), model(changed)
    assert torch.allclose(one[:, :7], two[:, :7])
    assert not torch.allclose(one[:, 7], two[:, 7])


def test_its_data_have_the_same_name_in_another_process() -> None:
    """Two contexts divide the same files differently: one digest, other numbers of samples."""
    code = "from torchrelay.jobs.stdlib_gpt import SourceWindows as S; print(S.of_stdlib(32).version)"
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ)
    version = _build(context=32).dataset_version
    assert done.stdout.strip() == str(version)
    other = SourceWindows.of_stdlib(64).version
    assert other.digest == version.digest
    assert other.num_samples < version.num_samples


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"d_modle": 32}, "did you mean 'd_model'"),
        ({"d_model": 30, "heads": 4}, "multiple of heads"),
        ({"layers": 0}, "at least 1"),
        ({"heads": 0}, "at least 1"),
        ({"context": 0}, "at least 1"),
        ({"d_model": -4}, "at least 1"),
        ({"layers": 1.0}, "must be of type int"),
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": float("nan")}, "dropout"),
        ({"lr": 0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"lr": float("inf")}, "finite"),
        ({"weight_decay": -0.1}, "not be negative"),
        ({"weight_decay": float("nan")}, "not be negative"),
        ({"warmup_steps": -1}, "not be negative"),
    ],
)
def test_its_options_are_checked(options: dict[str, Any], words: str) -> None:
    """Before anything is trained."""
    with pytest.raises(JobError) as caught:
        _build(**options)
    assert words in str(caught.value)
