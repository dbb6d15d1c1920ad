"""torch.distributed.checkpoint on our store: any number of ranks, nothing half there, nothing pickled, damage found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.programs.dcp_ranks import Trained, digest
from torchrelay import Checkpointer, RelayReader, RelayWriter, TrainingState
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.reader import load_manifest, verify_checkpoint
from torchrelay.launch.rendezvous import free_port
from torchrelay.store import open_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
_PROGRAM = Path(__file__).parent.parent / "programs" / "dcp_ranks.py"


def _ranks(number: int, *words: object) -> list[subprocess.CompletedProcess[str]]:
    """Run the program on this many ranks; what each said, and how it ended."""
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(number),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(_PROGRAM.parent.parent.parent),
    }
    command = [sys.executable, str(_PROGRAM), *map(str, words)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(command, env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
        for rank in range(number)
    ]
    try:
        printed = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(command, process.returncode, *texts)
        for process, texts in zip(processes, printed, strict=True)
    ]


def _said(number: int, *words: object) -> list[str]:
    ended = _ranks(number, *words)
    assert all(rank.returncode == 0 for rank in ended), "\n".join(rank.stderr[-3000:] for rank in ended)
    return [line.split()[1] for line in ended[0].stdout.splitlines() if line.startswith(("saved", "loaded"))]


def _small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_saved_by_two_ranks_loaded_by_three_and_by_one(tmp_path: Path) -> None:
    """FSDP2, twice and once asynchronously, with one writer: the newest comes back in any layout, bit for bit, and a file system's copy agrees."""
    store = f"file://{tmp_path / 'store'}"
    saved = _said(2, store, "r", 100, 200, "async", 300)
    assert _said(3, store, "r", "load") == [saved[2]]
    alone = Trained(seed=2)
    state = alone.state(0)
    reader = RelayReader(store, run="r")
    dcp.load(state, storage_reader=reader)
    assert digest(state) == saved[2]
    assert (reader.ref, state["epoch"]) == (ManifestRef(300, 1), 300)
    only: dict[str, Any] = {"own": {"rank": 0}}  # a value that rank 0 did not have
    dcp.load(only, storage_reader=reader)
    assert only == {"own": {"rank": 1}}
    older = Trained(seed=4).state(0)
    dcp.load(older, storage_reader=reader, checkpoint_id="100")
    assert digest(older) == saved[0]
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "folder"))
    again = Trained(seed=3).state(0)
    dcp.load(again, storage_reader=dcp.FileSystemReader(tmp_path / "folder"))
    assert digest(again) == saved[2]
    opened = open_store(store)
    assert [ref.step for ref in read_history(opened, "r").line] == [100, 200, 300]
    verify_checkpoint(opened, "r", ManifestRef(300, 1))


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Rank 1 dies with its shard unwritten; the next start loads what was committed, and saves on in a new generation."""
    store = f"file://{tmp_path}"
    ended = _ranks(2, store, "r", 100, "die", 200)
    assert ended[1].returncode == -9
    assert ended[0].returncode not in (0, None)
    assert [ref.step for ref in read_history(open_store(store), "r").line] == [100]
    state = Trained(seed=2).state(0)
    dcp.load(state, storage_reader=RelayReader(store, run="r"))
    assert state["epoch"] == 100
    dcp.save(state, storage_writer=RelayWriter(store, run="r", step=200))
    assert read_history(open_store(store), "r").latest == ManifestRef(200, 2)


class _Odd:
    """Something that only a pickle could hold."""


def test_what_has_no_encoding_is_refused_by_name(tmp_path: Path) -> None:
    """Nothing is pickled, the failed save is not there, and the same writer goes on, in a new generation."""
    store, model = f"file://{tmp_path}", _small()[0]
    writer = RelayWriter(store, run="r")
    dcp.save({"model": model.state_dict()}, storage_writer=writer, checkpoint_id="1")
    with pytest.raises(dcp.CheckpointException, match=r"UnserialisableError: extra\.odd holds a .*_Odd"):
        dcp.save({"model": model.state_dict(), "extra": {"odd": _Odd()}}, storage_writer=writer, checkpoint_id="2")
    with pytest.raises(dcp.CheckpointException, match=r"UnserialisableError: s is a torch\.sparse_coo tensor"):
        dcp.save({"s": torch.ones(2).to_sparse()}, storage_writer=writer)
    assert read_history(open_store(store), "r").latest == ManifestRef(1, 1)
    dcp.save({"model": model.state_dict(), "extra": {"even": (1, 2.5, None)}}, storage_writer=writer, checkpoint_id="2")
    assert read_history(open_store(store), "r").latest == ManifestRef(2, 2)
    loaded: dict[str, Any] = {"extra": {"even": None}}
    dcp.load(loaded, storage_reader=RelayReader(store, run="r"))
    assert loaded["extra"]["even"] == (1, 2.5, None)


def test_steps_only_go_forward(tmp_path: Path) -> None:
    """New writers go on in one generation; a step that is not past the newest is refused, and so is a word that is no step, or none."""
    store, state = f"file://{tmp_path}", {"w": torch.arange(6)}
    for step in (10, 20):
        dcp.save(state, storage_writer=RelayWriter(store, run="r", step=step))
    assert read_history(open_store(store), "r").line == (ManifestRef(10, 1), ManifestRef(20, 1))
    for step in (20, 15, 0):
        with pytest.raises(dcp.CheckpointException, match=f"ConfigError: step {step} cannot be saved"):
            dcp.save(state, storage_writer=RelayWriter(store, run="r", step=step))
    with pytest.raises(dcp.CheckpointException, match="no step is given"):
        dcp.save(state, storage_writer=RelayWriter(store, run="r"))
    with pytest.raises(Exception, match="'last' is not a step"):
        dcp.save(state, storage_writer=RelayWriter(store, run="r"), checkpoint_id="last")
    with pytest.raises(dcp.CheckpointException, match="its newest: 10, 20"):
        dcp.load(dict(state), storage_reader=RelayReader(store, run="r", step=15))


def test_a_writer_that_was_overtaken_cannot_go_on(tmp_path: Path) -> None:
    """After another start of the run, the old writer is fenced; a new one takes over again."""
    store, model = f"file://{tmp_path}", _small()[0]
    writer = RelayWriter(store, run="r")
    dcp.save({"model": model.state_dict()}, storage_writer=writer, checkpoint_id="1")
    with Checkpointer(TrainingState(model=model), run="r", store=store) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert "holds no RNG" in restored.notices[0]
        checkpointer.save(2).result(60)
    with pytest.raises(dcp.CheckpointException, match="FencedError: generation 1 of run 'r' has been succeeded"):
        dcp.save({"model": model.state_dict()}, storage_writer=writer, checkpoint_id="3")
    dcp.save({"model": model.state_dict()}, storage_writer=RelayWriter(store, run="r", step=3))
    assert read_history(open_store(store), "r").latest == ManifestRef(3, 3)


def test_each_reads_what_the_other_saved(tmp_path: Path) -> None:
    """DCP loads a Checkpointer's model and optimizer, and a Checkpointer restores DCP's, by place and by name."""
    store = f"file://{tmp_path}"
    (model, optimizer), (other, others) = _small(), _small()
    with Checkpointer(TrainingState(model=model, optimizer=optimizer), run="ours", store=store) as checkpointer:
        checkpointer.save(5).result(60)
    state = {"model": other.state_dict(), "optimizer": others.state_dict()}
    dcp.load(state, storage_reader=RelayReader(store, run="ours"))
    assert digest(state) == digest({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    dcp.save(state, storage_writer=RelayWriter(store, run="theirs", step=6))
    (third, thirds), named = _small(), Trained()
    with Checkpointer(TrainingState(model=third, optimizer=thirds), run="theirs", store=store) as checkpointer:
        assert checkpointer.restore() is not None
    assert digest(thirds.state_dict()) == digest(optimizer.state_dict())
    saved = named.state(0)
    del saved["epoch"]
    dcp.save(saved, storage_writer=RelayWriter(store, run="named", step=7))
    fresh = Trained(seed=2)
    state_of_fresh = TrainingState(model=fresh.model, optimizer=fresh.optimizer)
    with Checkpointer(state_of_fresh, run="named", store=store) as checkpointer:
        assert checkpointer.restore() is not None
    restored = fresh.state(0)
    del restored["epoch"]
    assert digest(restored) == digest(saved)


def test_every_kind_of_tensor_and_place(tmp_path: Path) -> None:
    """Empty, scalar, strided, complex and half tensors, into other types and strided places; unchanged bytes are not written twice."""
    store, wide = f"file://{tmp_path}", torch.randn(1024, 300)
    state: dict[str, Any] = {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7),
        "strided": wide.t(),
        "half": torch.randn(5).bfloat16(),
        "list": [torch.ones(2), {"deep": torch.zeros(3, dtype=torch.complex64)}],
        "wide": wide,
        "conj": torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj(),
    }
    writer = RelayWriter(store, run="r")
    dcp.save(state, storage_writer=writer, checkpoint_id="1")
    dcp.save(state, storage_writer=writer, checkpoint_id="2")
    packs = tmp_path / "runs/r/packs"
    assert {path.parent.name for path in packs.glob("*/*")} == {str(ManifestRef(1, 1))}
    dcp.save({"w": wide}, storage_writer=RelayWriter(store, run="r", step=3))
    dcp.save(
        state, storage_writer=writer, checkpoint_id="4"
    )  # its own last save is not the newest: it refers to nothing
    assert {path.parent.name for path in packs.glob("*/*")} == {str(ManifestRef(step, 1)) for step in (1, 3, 4)}
    into: dict[str, Any] = {
        "empty": torch.ones(0, 4),
        "scalar": torch.tensor(0),
        "strided": torch.zeros(300, 1024),
        "half": torch.zeros(5),
        "list": [torch.zeros(2), {"deep": torch.ones(3, dtype=torch.complex64)}],
        "wide": torch.zeros(300, 1024).t(),
        "conj": torch.zeros(2, dtype=torch.complex64).conj(),
    }
    dcp.load(into, storage_reader=RelayReader(store, run="r"))
    assert torch.equal(into["half"], state["half"].float())
    assert torch.equal(into["conj"], state["conj"])
    for name in ("half", "conj"):
        del into[name], state[name]
    assert digest(into) == digest(state)
    assert load_manifest(open_store(store), "r", ManifestRef(2, 1)).tensors.keys() >= {"wide", "list.1.deep"}


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    """No load gives damaged tensors; another step still loads."""
    store, writer = f"file://{tmp_path}", RelayWriter(f"file://{tmp_path}", run="r")
    for step in (1, 2):
        dcp.save({"w": torch.full((1000,), float(step))}, storage_writer=writer, checkpoint_id=str(step))
    (pack,) = (tmp_path / "runs/r/packs" / str(ManifestRef(2, 1))).iterdir()
    good = pack.read_bytes()
    pack.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    into = {"w": torch.zeros(1000)}
    with pytest.raises(dcp.CheckpointException, match=r"CorruptionError: .* is damaged at byte"):
        dcp.load(into, storage_reader=RelayReader(store, run="r"))
    dcp.load(into, storage_reader=RelayReader(store, run="r", step=1))
    assert torch.equal(into["w"], torch.ones(1000))


def test_flat_state_and_plain_loads(tmp_path: Path) -> None:
    """A planner that does not flatten keeps its keys and values; a program without any model loads all there is."""
    store = f"file://{tmp_path}"
    state = {"w": torch.arange(4), "config": {"lr": 0.1, "name": "x"}}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=RelayWriter(store, run="flat", step=1), planner=planner)
    into: dict[str, Any] = {"w": torch.zeros(4, dtype=torch.int64), "config": None}
    plain = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(into, storage_reader=RelayReader(store, run="flat"), planner=plain)
    assert digest(into) == digest(state)
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    assert digest(_load_state_dict_from_keys(storage_reader=RelayReader(store, run="flat"))) == digest(state)
