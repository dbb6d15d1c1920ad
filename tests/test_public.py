"""The public names, and what importing costs: a name that is not on this list may change without notice."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import torchrelay

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = [
    "Checkpointer",
    "DatasetVersion",
    "ElasticSampler",
    "FaultSpec",
    "Job",
    "JobContext",
    "ObjectStore",
    "PendingCheckpoint",
    "RelayReader",
    "RelayWriter",
    "Restored",
    "RunSpec",
    "SaveSpec",
    "TrainSpec",
    "TrainingState",
    "WorldSpec",
    "elastic_loader",
    "load_spec",
    "open_store",
    "sample_generator",
]


def loaded_by(*modules: str) -> set[str]:
    """Return the top-level modules a new interpreter has loaded after importing these."""
    imports = "\n".join(f"import {name}" for name in modules)
    code = f"import sys\n{imports}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-W", "error::ImportWarning", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def modules_of(folder: str) -> list[str]:
    """Return the dotted names of the modules in a root package."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]


def test_the_public_names_are_these() -> None:
    """Adding or removing a public name is a decision, made here."""
    assert sorted(torchrelay.__all__) == PUBLIC
    assert dir(torchrelay) == torchrelay.__all__


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name: str) -> None:
    """Each name is found where it is said to live, documented, and the same object every time."""
    found = getattr(torchrelay, name)
    assert found is getattr(torchrelay, name)
    assert found.__doc__
    assert found.__name__ == name


def test_the_testing_names_resolve() -> None:
    """What `torchrelay.testing` lists is there."""
    testing = importlib.import_module("torchrelay.testing")
    assert testing.__all__
    assert [name for name in testing.__all__ if not hasattr(testing, name)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    """Lazy resolution still answers like a module."""
    with pytest.raises(AttributeError, match="no attribute 'Checkpoint'"):
        _ = torchrelay.Checkpoint


def test_importing_the_library_loads_nothing_heavy() -> None:
    """The package itself costs milliseconds: no torch, no numpy, no client of a store."""
    assert not {"torch", "numpy", "minio", "prefect", "pandas", "rich"} & loaded_by("torchrelay", "torchrelay.config")


def test_the_launcher_and_the_commands_load_no_torch() -> None:
    """What runs beside the ranks starts fast and stays small."""
    modules = [
        "torchrelay.launch",
        "torchrelay.relay",
        "torchrelay.store",
        "torchrelay.state.courier",
        "torchrelay.cli",
    ]
    assert not {"torch", "prefect", "pandas"} & loaded_by(*modules)


@pytest.mark.parametrize("folder", ["tasks", "flows"])
def test_loading_the_orchestration_loads_no_torch(folder: str) -> None:
    """A Prefect process that only orders work never pays for PyTorch."""
    modules = modules_of(folder)
    assert modules
    assert "torch" not in loaded_by(*modules)


def test_importing_starts_no_thread() -> None:
    """Importing does nothing: no threads, no log handlers."""
    code = (
        "import logging, threading, torchrelay.launch, torchrelay.store, torchrelay.cli;"
        "print(threading.active_count(), len(logging.getLogger().handlers), len(logging.getLogger('torchrelay').handlers))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1", "0", "0"]
