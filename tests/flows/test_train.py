"""The flow ``train`` against a real Prefect server, with real launchers and ranks below it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, TaskRunFilter, TaskRunFilterFlowRunId
from prefect.client.schemas.objects import TaskRun

from flows.train import train
from tasks.report import artifact_key
from tests.flow_runs import Ended, Flow
from tests.launching import final_state, renamed, tiny_spec, train_to_the_end
from tests.waiting import wait_until
from torchrelay.config import spec_to_dict
from torchrelay.relay import read_status
from torchrelay.store import open_store
from torchrelay.testing.tiny import fail_at

_ROOT = Path(__file__).parents[2]


def _task_runs(ended: Ended) -> list[TaskRun]:
    """Task runs of the flow run, in order, once the server has heard of all their ends."""
    chosen = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[UUID(ended.flow_run_id)]))

    def read() -> list[TaskRun]:
        with get_client(sync_client=True) as client:
            return sorted(client.read_task_runs(task_run_filter=chosen), key=lambda run: run.name)

    wait_until(
        lambda: (runs := read()) and all(run.state and run.state.is_final() for run in runs),
        what="the task runs at the server",
    )
    return read()


def _page(run_id: str) -> tuple[str, UUID | None]:
    """The markdown page of a run, and the flow run it belongs to."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[artifact_key(run_id)]))
        )
    assert len(found) == 1
    return str(found[0].data), found[0].flow_run_id


def test_segments_become_task_runs_and_a_page(flow: Flow, store: str) -> None:
    """Two segments, two task runs, one page with chart and table; the second time it says that nothing is left to do."""
    spec = replace(tiny_spec(store, "plain", steps=30), segment_steps=20)
    state = flow.train(spec)
    assert state.type == "COMPLETED", state
    assert "step 30 is committed (2 segments" in state.message
    assert [(run.name, run.state_name) for run in _task_runs(state)] == [
        ("segment-1", "Completed"),
        ("segment-2", "Completed"),
    ]
    text, flow_run_id = _page("plain")
    assert flow_run_id == UUID(state.flow_run_id)
    assert "data:image/svg+xml;base64," in text
    assert "Step **30 of 30** is committed" in text
    assert "**Finished.**" in text
    assert [line.split("|")[1].strip() for line in text.split("## Checkpoints")[1].splitlines()[4:7]] == [
        "30",
        "20",
        "10",
    ]
    again = flow.train(spec)
    assert again.type == "COMPLETED"
    assert "nothing was done" in again.message
    assert len(read_status(open_store(store), "plain").generations) == 2


def test_a_killed_rank_costs_a_retry_of_its_segment_and_no_bit(flow: Flow, store: str, tmp_path: Path) -> None:
    """The task run waits, runs again, and the end equals that of the run that never fell."""
    spec = tiny_spec(store, "killed", ranks=2, steps=30, fail_at=fail_at(1, 17, flag=tmp_path / "flag"))
    state = flow.train(spec)
    assert state.type == "COMPLETED", state
    (run,) = _task_runs(state)
    assert run.run_count == 2
    status = read_status(open_store(store), "killed")
    first, second = status.generations
    assert first.outcome is not None
    assert (first.outcome.kind, first.outcome.rank, second.begin_step) == ("killed", 1, 10)
    assert second.why == "segment 1, again after: killed"
    train_to_the_end(renamed(spec, "twin"))
    assert final_state(store, "killed") == final_state(store, "twin")


def test_a_fault_that_comes_back_at_the_same_step_stops_the_run(flow: Flow, store: str) -> None:
    """The same exception at the same step again: another try would only cost time. The message holds the timeline and what to do."""
    state = flow.train(tiny_spec(store, "bug", steps=30, fail_at=fail_at(0, 4, how="raise")))
    assert state.type == "FAILED"
    message = state.message
    assert "the same fault came back at the same step 5: ValueError: a bad batch, as ordered" in message
    assert message.count("began at step 0") == 2
    assert "hint: fix the job" in message


def test_three_generations_without_progress_are_the_last(flow: Flow, store: str) -> None:
    """Kills are worth a retry each, but not for ever: only a new committed step gives the budget back."""
    state = flow.train(tiny_spec(store, "stuck", steps=30, fail_at=fail_at(0, 13)))
    assert state.type == "FAILED"
    message = state.message
    assert "no progress: 3 generations in a row committed nothing new beyond step 10" in message
    # Four in all: the first one brought step 10, and its end is not held against it.
    assert [item.begin_step for item in read_status(open_store(store), "stuck").generations] == [0, 10, 10, 10]
    assert message.count("began at step 10") == 3


@pytest.mark.parametrize(
    ("job", "options", "expected"),
    [
        ("no_such_package:build", {}, "no_such_package"),
        ("torchrelay.testing.tiny:no_such", {}, "no_such"),
        ("torchrelay.testing.tiny:build", {"width": "wide"}, "wide"),
        ("torchrelay.testing.tiny:build", {"odd": True}, "has no typed encoding"),
    ],
)
def test_what_the_user_must_mend_is_not_tried_again(
    flow: Flow, store: str, job: str, options: dict[str, Any], expected: str
) -> None:
    """One generation, a message that names the thing, no traceback around it."""
    spec = tiny_spec(store, "wrong", **options)
    state = flow.train(replace(spec, run=replace(spec.run, job=job)))
    assert state.type == "FAILED"
    assert expected in state.message
    assert len(read_status(open_store(store), "wrong").generations) <= 2


def test_a_run_of_another_spec_is_left_alone(flow: Flow, store: str) -> None:
    """The message says what differs; nothing is started."""
    spec = tiny_spec(store, "taken", steps=10)
    assert flow.train(spec).type == "COMPLETED"
    state = flow.train(replace(spec, run=replace(spec.run, seed=7)))
    assert state.type == "FAILED"
    assert "seed" in state.message
    assert len(read_status(open_store(store), "taken").generations) == 1


def test_a_store_that_is_not_there_is_a_clear_failure(flow: Flow) -> None:
    """No store named: said at once, with what to do."""
    state = flow.train(tiny_spec("", "nowhere"))
    assert state.type == "FAILED"
    assert "no store is given" in state.message
    assert "torchrelay up" in state.message


def test_unknown_and_odd_parameters_are_refused_before_anything_starts(flow: Flow, store: str) -> None:
    """A misspelt field would otherwise be dropped in silence, and the run be another one than was meant."""
    tree = spec_to_dict(tiny_spec(store, "typo"))
    for spoil in (
        {"segment_step": 3},
        {"run": {**tree["run"], "total_step": 3}},
        {"run": {**tree["run"], "run_id": "../x"}},
    ):
        state = flow.train({**tree, **spoil})
        assert state.type == "FAILED"
        assert "invalid parameters" in state.message
    assert not read_status(open_store(store), "typo").exists


def test_the_run_form_is_described_and_ordered() -> None:
    """What Prefect makes of the spec: every field has a description and a place."""
    definitions = dict(train.parameters.definitions)
    assert {"TrainSpec", "RunSpec", "WorldSpec", "SaveSpec", "FaultSpec"} <= definitions.keys()
    for name, definition in definitions.items():
        for field, schema in definition["properties"].items():
            assert schema.get("description") or "$ref" in schema, f"{name}.{field}"
        positions = [schema["position"] for schema in definition["properties"].values()]
        assert positions == sorted(positions), name
        assert definition["additionalProperties"] is False
    run = definitions["RunSpec"]
    assert list(run["properties"])[:2] == ["run_id", "job"]
    assert run["required"] == ["run_id"]


def test_loading_a_flow_loads_no_torch() -> None:
    """A worker starts a flow run in a second, and a torch that hangs cannot keep it from reporting."""
    code = "import sys, flows.train, flows.serve; print('torch' in sys.modules, 'pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
