"""How a job is found and built: every mistake of its author ends in one message with the place and what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def _imports_kept(tmp_path: Path) -> Iterator[None]:
    """Leave no job of one test to be found by the next."""
    paths, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = paths
    for name, module in list(sys.modules.items()):
        if name not in modules and str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


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
    assert resolve_job("./my_job.py:build") is resolve_job(target)


def test_a_neighbour_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beside the job that is called like a module of Python is not what the job's imports find."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "colorsys.py").write_text("raise SystemExit('the wrong one')\n")
    target = _file(tmp_path, "import colorsys\ndef build(context):\n    return colorsys.__file__\n")
    found = Path(str(resolve_job(target)(_CONTEXT)))
    assert found.parent != tmp_path


def test_a_relative_import_beside_a_file_says_what_to_write_instead(tmp_path: Path) -> None:
    """A file named by its path is part of no package; as package.module the same file may do it."""
    package = tmp_path / "package_of_jobs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sibling.py").write_text("VALUE = 7\n")
    target = _file(package, "from .sibling import VALUE\ndef build(context):\n    return VALUE\n")
    with pytest.raises(JobError) as caught:
        resolve_job(target)
    assert "my_job.py, line 1" in str(caught.value)
    assert "`import name`" in caught.value.hint
    sys.path.append(str(tmp_path))
    assert resolve_job("package_of_jobs.my_job:build")(_CONTEXT) == 7  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("target", "words", "hint"),
    [
        ("no_such_package.x:build", "no module 'no_such_package'", "install it"),
        ("torchrelay.testing.tini:build", "no module 'torchrelay.testing.tini'", "install"),
        ("torchrelay.testing.tiny:biuld", "has no 'biuld'", "did you mean 'build'"),
        ("torchrelay.testing.tiny:_SAMPLES", "is a int, not a function", "functions of torchrelay.testing.tiny: build"),
        ("somewhere/no.py:build", "no job file", "relative to"),
        ("somewhere/no.txt:build", "must end in .py", "package.module:function"),
        ("~nosuchuser/my_job.py:build", "cannot be found", "check the path"),
        ("nul\0.py:build", "cannot be found", "check the path"),
        ("nocolon", "must look like", "for example"),
        (":build", "must look like", "for example"),
        ("module:", "must look like", "for example"),
        (".relative:build", "must look like", "for example"),
    ],
)
def test_targets_that_lead_nowhere(target: str, words: str, hint: str) -> None:
    """What is missing, and what is near."""
    with pytest.raises(JobError) as caught:
        resolve_job(target)
    assert words in str(caught.value)
    assert hint in caught.value.hint


def test_a_file_with_a_typing_error_in_its_name(tmp_path: Path) -> None:
    """The nearest file of the folder is proposed, and its own functions for a wrong function."""
    target = _file(tmp_path, _JOB)
    with pytest.raises(JobError, match=r"did you mean .*my_job\.py"):
        resolve_job(target.replace("my_job", "my_jobs"))
    with pytest.raises(JobError, match=r"functions of .*: build"):
        resolve_job(target.replace(":build", ":zzz"))


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
    assert caught.value.hint


def test_the_line_is_the_users_own(tmp_path: Path) -> None:
    """Also where the error came out of a library that it called."""
    text = "import json\n\ndef build(context):\n    name = '{'\n    return json.loads(name)\n"
    with pytest.raises(JobError, match=r"my_job\.py, line 5\)"):
        build_job(_file(tmp_path, text), _CONTEXT)


@pytest.mark.parametrize(
    "text",
    [
        "def build(:\n",
        "import no_such_thing\n",
        "1 / 0\n",
        "raise SystemExit\n",
        "# coding: no-such-coding\n",
    ],
)
def test_files_that_cannot_be_imported(tmp_path: Path, text: str) -> None:
    """Syntax, imports, errors, exits; a mended file is imported afresh."""
    target = _file(tmp_path, text)
    with pytest.raises(JobError, match="my_job") as caught:
        resolve_job(target)
    assert f"python {tmp_path / 'my_job.py'}" in caught.value.hint
    _file(tmp_path, _JOB + "\n# mended\n")
    assert callable(resolve_job(target))


def test_a_name_that_is_imported_late_and_fails(tmp_path: Path) -> None:
    """As packages do that load their parts when they are asked for them."""
    target = _file(tmp_path, "def __getattr__(name):\n    raise ImportError('no backend for ' + name)\n")
    with pytest.raises(JobError, match=r"no backend for build .*my_job\.py, line 2") as caught:
        resolve_job(target)
    assert "install" in caught.value.hint


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


@dataclass
class _Needs:
    needed: str


def test_options_are_read_with_their_types() -> None:
    """An integer is a fine float; defaults fill the rest."""
    assert read_options(_Options, {"rate": 2, "wide": True}) == _Options(rate=2.0, wide=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wdith": 3}, "did you mean 'width'"),
        ({"zzz": 3}, "known options: name (str), rate (float), wide (bool), width (int)"),
        ({"width": "3"}, "must be of type int, not str"),
        ({"width": True}, "not bool"),
        ({"width": 2.5}, "not float"),
        ({"width": None}, "not NoneType"),
        ({"rate": "0.1"}, "must be of type float, not str"),
        ({"rate": True}, "must be of type float, not bool"),
        ({"wide": 1}, "must be of type bool, not int"),
        ({"width": 0}, "width must be at least 1"),
        ({"rate": 10**400}, "too large"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], words: str) -> None:
    """Name, type and range."""
    with pytest.raises(JobError) as caught:
        read_options(_Options, options)
    assert words in str(caught.value)
    assert caught.value.hint


def test_an_option_that_must_be_given() -> None:
    """Left out, it is named."""
    with pytest.raises(JobError, match=r"missing .*'needed'") as caught:
        read_options(_Needs, {})
    assert "needed (str)" in caught.value.hint
