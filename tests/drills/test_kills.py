"""Kill experiments on a real store: whatever is killed or frozen, the run ends with the bytes of the run that never fell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.conftest import PrefectServer, prefect_server
from tests.launching import Launch, final_state, renamed, tiny_spec, train_to_the_end
from tests.waiting import wait_until
from torchrelay.checkpoint.generation import read_lease
from torchrelay.checkpoint.history import read_history
from torchrelay.config import TrainSpec, spec_to_dict
from torchrelay.relay import read_status
from torchrelay.store import open_store
from torchrelay.testing.servers import JuiceGateway, SeaweedServer

pytestmark = [pytest.mark.drill, pytest.mark.timeout(400)]

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A prefix of the real store for this test; its keys are in the environment, as in production."""
    return _use(seaweed, monkeypatch, request)


def _use(server: SeaweedServer | JuiceGateway, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    environ = server.environ(f"drill-{abs(hash(request.node.name)):x}")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return environ["TORCHRELAY_STORE"]


def _slow_spec(store: str, run_id: str, *, sleep_s: float = 0.02) -> TrainSpec:
    """Two ranks, loader workers, 120 steps of 20 ms: long enough to be hit in the middle."""
    return tiny_spec(store, run_id, ranks=2, steps=120, interval=10, workers=1, sleep_s=sleep_s)


def _equals_the_unbroken(store: str, spec: TrainSpec) -> None:
    twin = renamed(spec, "twin", **spec.run.options)
    train_to_the_end(twin)
    assert final_state(store, spec.run.run_id) == final_state(store, "twin")


@pytest.mark.parametrize("victim", ["rank", "courier"])
def test_a_killed_child_costs_less_than_an_interval(store: str, victim: str) -> None:
    """SIGKILL of a rank ends its generation; of a courier not even that."""
    spec = _slow_spec(store, "child")
    launch = Launch(spec)
    launch.wait_committed(20)
    os.kill(launch.pids(victim)[-1], signal.SIGKILL)
    outcome = launch.outcome()
    assert outcome.kind == ("killed" if victim == "rank" else "completed"), outcome
    assert launch.all_gone()
    train_to_the_end(spec)
    status = read_status(open_store(store), "child")
    first, last = status.generations[0], status.generations[-1]
    assert first.outcome is not None
    if victim == "rank":
        assert first.outcome.last_step - last.begin_step <= spec.save.interval_steps + 1
    _equals_the_unbroken(store, spec)


def test_a_killed_launcher_takes_its_ranks_with_it(store: str) -> None:
    """They end without it; what the couriers hold is still committed; the next generation does not wait for a lease."""
    spec = _slow_spec(store, "launcher")
    launch = Launch(spec)
    launch.wait_committed(20)
    launch.kill()
    wait_until(launch.all_gone, timeout_s=60, what="the end of ranks and couriers")
    assert train_to_the_end(spec)[-1].begin_step >= 20
    _equals_the_unbroken(store, spec)


def test_a_killed_flow_process_leaves_a_run_that_goes_on(store: str, tmp_path: Path) -> None:
    """SIGKILL of the flow: the launcher notices, commits where it is, and the next flow run takes over from that step."""
    spec = _slow_spec(store, "flow")
    with prefect_server(tmp_path / "prefect") as server:
        flow = _start_flow(server, spec)
        wait_until(lambda: read_status(open_store(store), "flow").committed_step >= 20, timeout_s=90, what="step 20")
        flow.kill()
        flow.wait()
        assert flow.stdout is not None
        flow.stdout.close()
        wait_until(lambda: _ended(store, "flow"), timeout_s=60, what="the end of the orphaned launcher")
        (generation,) = read_status(open_store(store), "flow").generations
        assert generation.outcome is not None
        assert generation.outcome.kind == "preempted"
        assert generation.outcome.committed_step == generation.outcome.last_step
        assert _end_of_flow(_start_flow(server, spec))["type"] == "COMPLETED"
    status = read_status(open_store(store), "flow")
    assert [item.begin_step for item in status.generations] == [0, generation.outcome.committed_step]
    _equals_the_unbroken(store, spec)


@pytest.mark.parametrize("frozen", ["launcher", "everything"])
def test_a_frozen_generation_that_thaws_does_not_count(store: str, frozen: str) -> None:
    """SIGSTOP past the lease, a successor runs to the end, SIGCONT: the zombie finds out and changes nothing."""
    spec = _slow_spec(
        store, "zombie", sleep_s=0.1
    )  # what is left takes longer than the lease: the ranks must not finish meanwhile
    zombie = Launch(spec)
    zombie.wait_committed(20)
    pids = [zombie.process.pid]
    if frozen == "everything":
        pids += [*zombie.pids("rank"), *zombie.pids("courier")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    begun_at = read_history(open_store(store), "zombie").latest
    assert begun_at is not None
    outcomes = train_to_the_end(spec, tries=3)
    assert outcomes[-1].generation > 1
    before = final_state(store, "zombie")
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    assert zombie.outcome().kind in ("fenced", "killed", "exception"), zombie.events[-1]
    wait_until(zombie.all_gone, timeout_s=60, what="the end of the zombie")
    assert final_state(store, "zombie") == before
    _equals_the_unbroken(store, spec)


def test_a_store_that_dies_in_a_save_and_comes_back_is_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Training goes on without it up to the loss bound; when it is back the newest state is committed."""
    with SeaweedServer(tmp_path / "weed") as server:
        store = _use(server, monkeypatch, request)
        spec = _slow_spec(store, "away")
        launch = Launch(spec)
        launch.wait_committed(20)
        _kill_in_a_save(launch, server)
        reached = launch.events[-1].get("step", 0)
        launch.wait_for(
            lambda event: event["event"] == "progress" and event["step"] > reached, what="a step without store"
        )
        server.start()
        outcome = launch.outcome(timeout_s=150)
        assert outcome.kind == "completed", outcome
        assert outcome.generation == 1
        _equals_the_unbroken(store, spec)


def _kill_in_a_save(launch: Launch, server: SeaweedServer) -> None:
    """Kill the server right after a rank has handed over a snapshot, before it can be committed."""
    known = len(launch.events)
    launch.wait_for(
        lambda event: event["event"] == "saved" and event["state"] == "staged" and _is_new(launch, event, known)
    )
    server.kill()


def _is_new(launch: Launch, event: dict[str, object], known: int) -> bool:
    return any(event is item for item in launch.events[known:])


def test_a_store_without_conditional_writes_is_used_loudly(
    juice: JuiceGateway, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """MinIO's front end that ignores conditions: the run works, survives a kill, and says what is not guaranteed."""
    store = _use(juice, monkeypatch, request)
    spec = _slow_spec(store, "plain")
    launch = Launch(spec)
    launch.wait_committed(20)
    notices = [event["message"] for event in launch.events if event["event"] == "notice"]
    assert any("conditional" in message for message in notices), notices
    os.kill(launch.pids("rank")[0], signal.SIGKILL)
    assert launch.outcome().kind == "killed"
    train_to_the_end(spec)
    _equals_the_unbroken(store, spec)


def test_a_segment_does_not_notice_that_the_prefect_server_is_down(store: str, tmp_path: Path) -> None:
    """Dead for 100 seconds while a segment trains: one generation, no pause, and the flow run ends as it should."""
    spec = tiny_spec(store, "outage", steps=1300, interval=100, sleep_s=0.1)
    opened = open_store(store)
    with prefect_server(tmp_path / "prefect") as server:
        flow = _start_flow(server, spec)
        wait_until(lambda: read_status(opened, "outage").committed_step >= 100, timeout_s=90, what="step 100")
        server.stop()
        before = read_status(opened, "outage").committed_step
        lease = read_lease(opened, "outage", 1)
        assert lease is not None
        # A step takes a tenth of a second: a thousand steps later the server has been away for a hundred.
        wait_until(
            lambda: read_status(opened, "outage").committed_step >= before + 1000, timeout_s=200, what="1000 steps more"
        )
        server.start()
        assert _end_of_flow(flow)["type"] == "COMPLETED"
    (generation,) = read_status(opened, "outage").generations
    assert generation.outcome is not None
    assert generation.outcome.kind == "completed"


def _start_flow(server: PrefectServer, spec: TrainSpec) -> subprocess.Popen[str]:
    flow = subprocess.Popen(
        [sys.executable, str(_ROOT / "tests/programs/run_flow.py"), "train"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **server.environ, "PYTHONPATH": str(_ROOT)},
    )
    assert flow.stdin is not None
    flow.stdin.write(json.dumps({"spec": spec_to_dict(spec)}))
    flow.stdin.close()
    return flow


def _end_of_flow(flow: subprocess.Popen[str]) -> dict[str, str]:
    assert flow.stdout is not None
    with flow.stdout as stdout:
        lines = stdout.read().splitlines()
    assert flow.wait(60) == 0
    ended: dict[str, str] = json.loads(lines[-1])
    return ended


def _ended(store: str, run_id: str) -> bool:
    return all(item.outcome is not None for item in read_status(open_store(store), run_id).generations)
