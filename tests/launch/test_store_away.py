"""A store that goes away under a running job and comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.launching import Launch, final_state, renamed, tiny_spec, train_to_the_end
from tests.waiting import wait_until
from torchrelay.config import SaveSpec
from torchrelay.relay import read_status
from torchrelay.store import open_store
from torchrelay.testing.chaos_proxy import ChaosProxy
from torchrelay.testing.servers import SeaweedServer

_INTERVAL, _BOUND = 5, 15


def _notices(launch: Launch, words: str) -> list[str]:
    return [
        event["message"] for event in list(launch.events) if event["event"] == "notice" and words in event["message"]
    ]


def _step(launch: Launch) -> int:
    steps = [int(event["step"]) for event in list(launch.events) if event["event"] == "progress" and "step" in event]
    return max(steps, default=0)


def test_training_goes_on_up_to_the_loss_bound_then_waits_loudly_and_goes_on(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No connection to the store: so many steps are still trained, not one more, and it is said; afterwards the run ends as if nothing had been."""
    with ChaosProxy(seaweed.endpoint) as proxy:
        environ: dict[str, Any] = {**seaweed.environ("away"), "TORCHRELAY_S3_ENDPOINT": proxy.endpoint}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        store = environ["TORCHRELAY_STORE"]
        spec = tiny_spec(store, "away", steps=80, sleep_s=0.02)
        spec = replace(spec, save=SaveSpec(interval_steps=_INTERVAL, loss_bound_steps=_BOUND))
        launch = Launch(spec)
        launch.wait_committed(_INTERVAL)
        proxy.add("*", "refuse", times=2**31)
        wait_until(lambda: _notices(launch, "training waits for the store"), timeout_s=60, what="the wait at the bound")
        (said,) = _notices(launch, "training waits for the store")
        committed = int(said.split("only step ")[1].split()[0])
        assert f"step {committed + _BOUND}," in said
        reached = _step(launch)
        assert committed + _INTERVAL < reached <= committed + _BOUND
        # Long enough for many more steps, and for the courier to have tried again.
        count = len(proxy.served)
        wait_until(lambda: len(proxy.served) > count + 5, timeout_s=60, what="attempts of the courier")
        assert _step(launch) <= committed + _BOUND
        proxy.clear()
        outcome = launch.outcome(timeout_s=120)
        assert (outcome.kind, outcome.generation) == ("completed", 1), outcome
        assert _notices(launch, "training goes on")
        assert read_status(open_store(store), "away").finished
        train_to_the_end(renamed(spec, "twin"))
        assert final_state(store, "away") == final_state(store, "twin")
