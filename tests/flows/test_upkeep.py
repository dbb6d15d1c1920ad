"""The flow ``upkeep`` against a real Prefect server and a store on disk."""

from __future__ import annotations

from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from tests.flow_runs import Flow
from tests.launching import tiny_spec, train_to_the_end
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import manifests_prefix, packs_prefix
from torchrelay.checkpoint.marks import list_verified
from torchrelay.checkpoint.reader import loss_trace, verify_checkpoint
from torchrelay.checkpoint.survey import take_survey
from torchrelay.store import open_store

_KEEP = {"newest": 2, "ladder_hours": 0}


def _page() -> str:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["upkeep"])))
    return str(max(found, key=lambda item: str(item.created)).data)


def test_a_round_verifies_forgets_and_sweeps(flow: Flow, store: str) -> None:
    """First only said, then done; the curve stays, what is kept is whole, and a second round has nothing left to do."""
    train_to_the_end(tiny_spec(store, "old", steps=60, interval=10, sleep_s=0.01))
    opened = open_store(store)
    curve, line = loss_trace(opened, "old"), read_history(opened, "old").line
    assert len(line) >= 4
    spec = {"store": store, "keep": _KEEP, "grace_hours": 0, "dry_run": True}
    said = flow.run("upkeep", spec)
    assert said.type == "COMPLETED", said
    assert read_history(opened, "old").line == line
    assert len(list_verified(opened, "old")) == 2
    done = flow.run("upkeep", {**spec, "dry_run": False})
    assert done.type == "COMPLETED", done
    assert read_history(opened, "old").line == line[-2:]
    assert loss_trace(opened, "old") == curve
    survey = take_survey(opened, "old")
    assert {finding.status for finding in survey.findings} == {"live"}
    assert not survey.missing
    for ref in read_history(opened, "old").line:
        verify_checkpoint(opened, "old", ref)
    assert f"| old | 0 | 2 | {len(line) - 2} |" in _page()
    again = flow.run("upkeep", {**spec, "dry_run": False})
    assert again.type == "COMPLETED"
    assert "freed 0.0 MiB" in again.message


def test_damage_is_told_and_the_other_runs_are_tended(flow: Flow, store: str, tmp_path: Path) -> None:
    """The round fails, names run and step, marks the checkpoint, forgets nothing that is needed, and goes on with the next run."""
    for run_id in ("bad", "good"):
        train_to_the_end(tiny_spec(store, run_id, steps=40, interval=10, sleep_s=0.01))
    opened = open_store(store)
    *older, newest = read_history(opened, "bad").line
    good = read_history(opened, "good").line
    key = opened.list(packs_prefix("bad", newest)).objects[0].key
    path = tmp_path / "store" / key
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    state = flow.run("upkeep", {"store": store, "keep": _KEEP, "grace_hours": 0})
    assert state.type == "FAILED"
    assert f"bad: step {newest.step} is damaged" in state.message
    assert read_history(opened, "bad").line == tuple(older[-2:])
    assert newest.key("bad") in {
        item.key for item in opened.list(manifests_prefix("bad")).objects
    }  # stays, as evidence
    assert read_history(opened, "good").line == good[-2:]


def test_a_run_that_is_not_there_is_named_with_those_that_are(flow: Flow, store: str) -> None:
    """Nothing is touched."""
    train_to_the_end(tiny_spec(store, "here", steps=10))
    state = flow.run("upkeep", {"store": store, "runs": ["gone"]})
    assert state.type == "FAILED"
    assert "no run 'gone'" in state.message
    assert "there are: here" in state.message
