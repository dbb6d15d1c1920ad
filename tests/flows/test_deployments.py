"""The served deployments and those of prefect.yaml are the same ones, and what they say is true."""

from __future__ import annotations

import asyncio
from pathlib import Path

import yaml
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint

from flows.serve import deployments
from torchrelay.config import parse_spec

_ROOT = Path(__file__).parents[2]


def test_both_ways_offer_the_same() -> None:
    """Name, description, tags, parameters, schedule, and that the schedule is off until somebody switches it on."""
    served = asyncio.run(deployments())
    written = yaml.safe_load((_ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    assert [item.name for item in served] == [item["name"] for item in written] == ["train", "nightly", "upkeep"]
    for ours, theirs in zip(served, written, strict=True):
        assert (ours.description, ours.tags) == (theirs["description"], theirs["tags"])
        assert (ours.parameters or {}) == theirs.get("parameters", {})
        crons = [item.schedule.cron for item in ours.schedules or [] if isinstance(item.schedule, CronSchedule)]
        assert crons == [item["cron"] for item in theirs.get("schedules", [])]
        assert all(not item["active"] for item in theirs.get("schedules", []))
    assert all(item.paused for item in served[1:])


def test_the_entrypoint_is_the_flow_and_the_nightly_spec_is_one() -> None:
    """A worker loads the flow by this path; the schedule works as it is, with the default job."""
    written = yaml.safe_load((_ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    for item in written:
        name = load_flow_from_entrypoint(str(_ROOT / item["entrypoint"])).name
        assert name == ("upkeep" if item["name"] == "upkeep" else "train")
    assert parse_spec(written[1]["parameters"]["spec"]).run.run_id == "nightly"
