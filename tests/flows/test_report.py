"""The reporter and the page: whatever the server does, the caller is never blocked and nothing is raised."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.charts import line_chart
from tasks.report import Reporter, RunPage, artifact_key
from tests.launching import Launch, tiny_spec
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore
from torchrelay.testing.tiny import fail_at


@contextmanager
def _silent_server() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/api"


def _ask(client: SyncPrefectClient) -> None:
    client.hello()


def test_a_server_that_is_gone_costs_reports_only() -> None:
    """Refused connections are counted; closing takes no longer than it may."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
    with temporary_settings({PREFECT_API_URL: url}):
        reporter = Reporter(limit_s=1.0)
        for _ in range(3):
            assert reporter.submit(_ask)
        assert reporter.close(30.0)
    assert (reporter.failed, reporter.delivered, reporter.dropped) == (3, 0, 0)


def test_a_server_that_hangs_fills_the_queue_and_nothing_else() -> None:
    """Reports beyond the capacity are dropped at once; the caller never waits."""
    with _silent_server() as url, temporary_settings({PREFECT_API_URL: url}):
        reporter = Reporter(limit_s=30.0, capacity=2)
        accepted = [reporter.submit(_ask) for _ in range(8)]
        assert accepted.count(True) <= 3  # two in the queue, one under way
        assert reporter.dropped == accepted.count(False)
        assert not reporter.close(0.05)  # given up, not waited for


def test_a_report_that_raises_is_counted_and_the_next_one_runs() -> None:
    """An error of our own in a report is not different."""
    ran = threading.Event()

    def bad(client: SyncPrefectClient) -> None:
        raise KeyError("a bug in a report")

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        reporter = Reporter()
        reporter.submit(bad)
        reporter.submit(lambda client: ran.set())
        assert reporter.close(30.0)
    assert ran.is_set()
    assert (reporter.failed, reporter.delivered) == (1, 1)


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    """A store with a run that was killed once and then finished."""
    folder = tmp_path_factory.mktemp("page")
    url = f"file://{folder / 'store'}"
    spec = tiny_spec(url, "eventful", steps=20, interval=5, sleep_s=0.03, fail_at=fail_at(0, 12, flag=folder / "flag"))
    assert Launch(spec).outcome().kind == "killed"
    assert Launch(spec).outcome().kind == "completed"
    return open_store(url)


def test_the_page_tells_what_happened(eventful: ObjectStore) -> None:
    """Generations with their ends, newest first, each checkpoint once, and a picture without a network."""
    reporter = Reporter()
    page = RunPage(store=eventful, run_id="eventful", flow_run_id=None, reporter=reporter)
    text = page.draw()
    reporter.close(5.0)
    generations, checkpoints = text.split("## Generations")[1].split("## Checkpoints")
    assert re.findall(r"^\| (\d+) \|", generations, re.M) == ["2", "1"]
    assert "killed" in generations
    assert "completed" in generations
    assert re.findall(r"^\| (\d+) \|", checkpoints, re.M) == ["20", "15", "10", "5"]
    assert "](data:image/svg+xml;base64," in text
    assert "<svg" not in text
    assert "http" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    "points",
    [[], [(1, None)], [(1, 2.0)], [(step, float(step % 7)) for step in range(1, 5000)], [(1, float("nan")), (2, 1.0)]],
)
def test_any_trace_can_be_drawn(points: list[tuple[int, float | None]]) -> None:
    """Nothing yet, one point, poisoned points, many points: a well-formed picture of bounded size."""
    from xml.etree import ElementTree

    picture = line_chart(points, marks=[3])
    ElementTree.fromstring(picture)
    assert len(picture) < 40_000


def test_names_of_pages_stay_apart() -> None:
    """Prefect allows letters, digits and dashes only; runs that would collide get a suffix."""
    names = ["a-b", "a.b", "a_b", "a--b", "run-" + "x" * 76]
    keys = [artifact_key(name) for name in names]
    assert len(set(keys)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]+", key) for key in keys)
    assert artifact_key("a-b") == "run-a-b"


def test_requests_to_redraw_are_joined(tmp_path: Path) -> None:
    """A burst of commits draws the page once or twice, not once each."""
    with _silent_server() as url, temporary_settings({PREFECT_API_URL: url}):
        reporter = Reporter(limit_s=30.0)
        page = RunPage(store=open_store(f"file://{tmp_path}"), run_id="burst", flow_run_id=None, reporter=reporter)
        for _ in range(50):
            page.refresh()
        assert reporter.dropped == 0
        reporter.close(0.05)
