"""How a job is found and built: every mistake of its author ends in one message with the place and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torchrelay.errors import JobError
from torchrelay.jobs.job import JobContext, build_job, read_options, resolve_job

_CONTEXT = JobContext(options={}, total_steps=10, global_batch=4, seed=0, device="cpu", rank=0, world_size=1)

_JOB = """
import torch
from torch import nn
from torchrelay import DatasetVersion, Job

def build(context):
    model = nn.Linear(2, 1)
    return Job(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=[1, 2, 3],
        dataset_version=DatasetVersion("x", "ab" * 32, 3),
        loss=lambda model, batch: model(batch).mean(),
    )
"""


def _file(folder: Path, text: str, name: str = "my_job.py") -> str:
    (folder / name).write_text(text)
    return f"{folder / name}:build"


def test_by_module_and_by_file(tmp_path: Path) -> None:
    """Both kinds of target."""
    assert build_job("torchrelay.testing.tiny:build", _CONTEXT).optimizer is not None
    assert len(build_job(_file(tmp_path, _JOB), _CONTEXT).dataset) == 3


def test_a_file_finds_its_neighbours_and_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper module beside it; two files of one name in two folders stay two modules."""
    (tmp_path / "helper_beside_it.py").write_text("VALUE = 7\n")
    target = _file(tmp_path, "import helper_beside_it\ndef build(context):\n    return helper_beside_it.VALUE\n")
    assert resolve_job(target) is resolve_job(target)
    (tmp_path / "other").mkdir()
    other = _file(tmp_path / "other", _JOB)
    assert resolve_job(other) is not resolve_job(target)
    monkeypatch.chdir(tmp_path)
    assert resolve_job("my_job.py:build") is resolve_job(target)


@pytest.mark.parametrize(
    ("target", "words", "hint"),
    [
        ("no_such_package.x:build", "no module 'no_such_package'", "install it"),
        ("torchrelay.testing.tini:build", "no module 'torchrelay.testing.tini'", "install"),
        ("torchrelay.testing.tiny:biuld", "has no 'biuld'", "did you mean 'build'"),
        ("torchrelay.testing.tiny:_SAMPLES", "is a int, not a function", ""),
        ("somewhere/no.py:build", "no job file", "relative to"),
        ("somewhere/no.txt:build", "must end in .py", ""),
        ("nocolon", "must look like", ""),
    ],
)
def test_targets_that_lead_nowhere(target: str, words: str, hint: str) -> None:
    """What is missing, and what is near."""
    with pytest.raises(JobError) as caught:
        resolve_job(target)
    assert words in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def build(context):\n    return {}['key']\n", "KeyError: 'key'"),
        ("def build(context):\n    raise SystemExit(3)\n", "SystemExit: 3"),
        ("def build():\n    pass\n", "TypeError"),
        ("def build(context):\n    return 5\n", "returned a int, not a Job"),
        ("def build(context):\n    pass\n", "returned a NoneType"),
        (_JOB.replace("model=model", "model=5"), "model must be a torch.nn.Module, not int"),
        (_JOB.replace("[1, 2, 3]", "[1, 2]"), "2 samples, but its version says 3"),
    ],
)
def test_functions_that_do_not_build_a_job(tmp_path: Path, text: str, words: str) -> None:
    """The message names the error and the line of the user's file."""
    with pytest.raises(JobError) as caught:
        build_job(_file(tmp_path, text), _CONTEXT)
    assert words in str(caught.value)
    assert "my_job.py" in str(caught.value)


@pytest.mark.parametrize("text", ["def build(:\n", "import no_such_thing\n", "1 / 0\n", "raise SystemExit\n"])
def test_files_that_cannot_be_imported(tmp_path: Path, text: str) -> None:
    """Syntax, imports, errors, exits; a mended file is imported afresh."""
    target = _file(tmp_path, text)
    with pytest.raises(JobError, match="my_job"):
        resolve_job(target)
    _file(tmp_path, _JOB + "\n# mended\n")
    assert callable(resolve_job(target))


@pytest.mark.parametrize("error", ["MemoryError()", "ConnectionResetError('peer')", "TimeoutError('slow')"])
def test_trouble_that_is_not_the_jobs_fault_keeps_its_name(tmp_path: Path, error: str) -> None:
    """Memory and network are worth another try; a JobError is not."""
    with pytest.raises((MemoryError, OSError)):
        build_job(_file(tmp_path, f"def build(context):\n    raise {error}\n"), _CONTEXT)


@dataclass
class _Options:
    width: int = 3
    rate: float = 0.5
    name: str = "x"
    wide: bool = False

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError("width must be at least 1")


def test_options_are_read_with_their_types() -> None:
    """An integer is a fine float; defaults fill the rest."""
    assert read_options(_Options, {"rate": 2, "wide": True}) == _Options(rate=2.0, wide=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wdith": 3}, "did you mean 'width'"),
        ({"zzz": 3}, "known options: name, rate, wide, width"),
        ({"width": "3"}, "must be of type int, not str"),
        ({"width": True}, "not bool"),
        ({"width": 2.5}, "not float"),
        ({"width": 0}, "width must be at least 1"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], words: str) -> None:
    """Name, type and range."""
    with pytest.raises(JobError) as caught:
        read_options(_Options, options)
    assert words in str(caught.value)
