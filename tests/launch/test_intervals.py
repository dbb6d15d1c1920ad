"""Runs whose save interval is chosen from measured costs: real launchers, ranks and couriers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Launch, final_state, tiny_spec
from torchrelay.checkpoint.layout import interval_ledger_key
from torchrelay.config import SaveSpec, TrainSpec
from torchrelay.launch.ledger import read_interval_ledger
from torchrelay.store import open_store


def auto_spec(folder: Path, run_id: str, *, ranks: int = 1, steps: int = 250, bound: int = 400) -> TrainSpec:
    """A run that begins with 50 steps between saves and may choose up to half the bound."""
    spec = tiny_spec(f"file://{folder}", run_id, ranks=ranks, steps=steps, sleep_s=0.01)
    return replace(spec, save=SaveSpec(interval_steps=0, loss_bound_steps=bound))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_interval_is_chosen_and_the_ledger_says_why(tmp_path: Path, ranks: int) -> None:
    """Ranks that parted ways would hang in a collective; the numbers are those of any other interval."""
    spec = auto_spec(tmp_path, "auto", ranks=ranks)
    launch = Launch(spec)
    assert launch.outcome().kind == "completed"
    known = ledger(spec)
    assert known["tuner"]["failures"] == 0
    assert known["tuner"]["exposure_s"] > 1.0
    assert len(known["tuner"]["costs_s"]) >= 3
    assert known["changes"]
    for change in known["changes"]:
        assert 1 <= change["interval_steps"] <= 200
        assert "of training" in change["reason"]
        assert any(
            change["reason"] in str(event.get("message")) for event in launch.events if event["event"] == "notice"
        )
    gaps = saved_gaps(launch)
    assert gaps[:2] == [50, 50]
    assert gaps[3] != 50
    plain = replace(spec, run=replace(spec.run, run_id="plain"), save=SaveSpec(interval_steps=50))
    assert Launch(plain).outcome().kind == "completed"
    assert final_state(spec.store, "auto") == final_state(spec.store, "plain")


def test_the_next_generation_knows_the_failure_and_the_costs(tmp_path: Path) -> None:
    """A killed launcher is a failure that cost progress; what was learnt before is not learnt again."""
    spec = auto_spec(tmp_path, "killed", steps=2000)
    launch = Launch(spec)
    launch.wait_for(lambda event: event["event"] == "notice" and "a save every" in event["message"], what="a decision")
    first = ledger(spec)
    launch.kill()
    second = Launch(replace(spec, segment_steps=2000), stop_step=2000)
    second.wait_committed(1)
    second.process.terminate()
    assert second.outcome().kind == "preempted"
    after = ledger(spec)
    assert (first["tuner"]["failures"], after["tuner"]["failures"]) == (0, 1)
    assert after["tuner"]["exposure_s"] > first["tuner"]["exposure_s"]


def saved_gaps(launch: Launch) -> list[int]:
    """Steps between the saves that were requested."""
    steps = [event["step"] for event in launch.events if event["event"] == "saved" and event["state"] == "committed"]
    return [later - step for step, later in zip([0, *steps], steps, strict=False)]


def ledger(spec: TrainSpec) -> Mapping[str, Any]:
    """The newest ledger entry."""
    found = read_interval_ledger(open_store(spec.store), spec.run.run_id)
    assert found is not None
    return found


def test_a_damaged_ledger_stops_nothing(tmp_path: Path) -> None:
    """The run says so and learns anew."""
    spec = auto_spec(tmp_path, "damaged", steps=60)
    first = Launch(spec, stop_step=30)
    assert first.outcome().kind == "completed"
    open_store(spec.store).put(interval_ledger_key("damaged", 1), b"no such thing\n")
    second = Launch(spec, stop_step=60)
    assert second.outcome().kind == "completed"
    assert any("learnt of the save interval cannot be used" in str(event.get("message")) for event in second.events)
