"""The doctor on real servers: what it finds is what the server does, and what it prepares is what training needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrelay.cli.doctor import Finding, add_parsers, examine
from torchrelay.errors import StoreAccessError
from torchrelay.store import open_store
from torchrelay.store.s3_admin import bucket_policy
from torchrelay.testing.servers import JuiceGateway, SeaweedServer

SCOPED = {"TORCHRELAY_SCOPED_ACCESS_KEY": "trainingkey", "TORCHRELAY_SCOPED_SECRET_KEY": "training-secret-0123456789"}
UNUSED = "http://127.0.0.1:9"  # the discard port: nothing listens there


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A SeaweedFS server: keeps its conditions, has no MinIO admin API."""
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="module")
def juice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JuiceGateway]:
    """MinIO's own front end: ignores conditions, has MinIO's admin API."""
    with JuiceGateway(tmp_path_factory.mktemp("juice")) as server:
        yield server


def verdicts(findings: list[Finding]) -> dict[str, str]:
    """Return the worst verdict of each check."""
    order = ["ok", "warn", "fail"]
    worst: dict[str, str] = {}
    for finding in findings:
        worst[finding.check] = max(worst.get(finding.check, "ok"), finding.verdict, key=order.index)
    return worst


def test_a_sound_store_passes(seaweed: SeaweedServer) -> None:
    """A server that keeps every promise gets no warning, and nothing of the visit is left behind."""
    findings = examine("", seaweed.environ("sound"))
    assert verdicts(findings) == {"settings": "ok", "read and write": "ok", "one winner": "ok", "checksums": "ok"}
    assert open_store("", environ=seaweed.environ("sound")).list("").objects == ()


def test_a_missing_bucket_is_named_and_created_on_request(seaweed: SeaweedServer) -> None:
    """Without the bucket the hint says how to make it; with the option it is made; the second time it is there."""
    environ = {**seaweed.environ(), "TORCHRELAY_STORE": "s3://newcomer/relay"}
    missing = examine("", environ)[-1]
    assert (missing.verdict, missing.exit_code) == ("fail", StoreAccessError.exit_code)
    assert "--create-bucket" in missing.hint
    assert "created" in examine("", environ, create_bucket=True)[1].detail
    again = examine("", environ, create_bucket=True)
    assert "there" in again[1].detail
    assert "fail" not in verdicts(again).values()


def test_ignored_conditions_are_found(juice: JuiceGateway) -> None:
    """A store that answers 200 to everything is usable with a warning that says what is lost."""
    findings = examine("", juice.environ("ignored"))
    found = verdicts(findings)
    assert found["read and write"] == "ok"
    assert found["one winner"] == "warn"
    assert any("two starts" in finding.detail for finding in findings)


def test_the_scoped_key_reaches_its_bucket_and_nothing_else(juice: JuiceGateway) -> None:
    """With MinIO's admin API the second key is made, works in its bucket, and is refused in any other."""
    environ = {**juice.environ("scoped"), **SCOPED}
    findings = examine("", environ, create_bucket=True, scoped_user=True)
    assert verdicts(findings)["training key"] == "ok"
    assert "fail" not in verdicts(findings).values()
    keys = {
        "TORCHRELAY_ACCESS_KEY": SCOPED["TORCHRELAY_SCOPED_ACCESS_KEY"],
        "TORCHRELAY_SECRET_KEY": SCOPED["TORCHRELAY_SCOPED_SECRET_KEY"],
    }
    open_store("", environ={**environ, **keys}).put("probe/mine", b"x")
    other = "s3://other/relay"
    assert verdicts(examine(other, environ, create_bucket=True))["bucket"] == "ok"
    with pytest.raises(StoreAccessError):
        open_store(other, environ={**environ, **keys}).put("probe/theirs", b"x")


def test_making_the_scoped_key_again_changes_nothing(juice: JuiceGateway) -> None:
    """The one-shot runs at every start of the stack."""
    environ = {**juice.environ("again"), **SCOPED}
    first = verdicts(examine("", environ, create_bucket=True, scoped_user=True))
    assert verdicts(examine("", environ, create_bucket=True, scoped_user=True)) == first


def test_a_scoped_key_needs_the_root_key(juice: JuiceGateway) -> None:
    """A key without the right to make keys gets a clear refusal."""
    examine("", {**juice.environ("need"), **SCOPED}, create_bucket=True, scoped_user=True)
    environ = {
        **juice.environ("need"),
        "TORCHRELAY_ACCESS_KEY": SCOPED["TORCHRELAY_SCOPED_ACCESS_KEY"],
        "TORCHRELAY_SECRET_KEY": SCOPED["TORCHRELAY_SCOPED_SECRET_KEY"],
        "TORCHRELAY_SCOPED_ACCESS_KEY": "anotherkey",
        "TORCHRELAY_SCOPED_SECRET_KEY": "another-secret-0123456789",
    }
    last = examine("", environ, scoped_user=True)[-1]
    assert (last.check, last.verdict) == ("training key", "fail")
    assert "root key" in last.hint


def test_a_server_without_admin_api_must_know_the_key_itself(seaweed: SeaweedServer) -> None:
    """An admin call is never sent to a server that would take it for a write; an unknown key is reported."""
    last = examine("", {**seaweed.environ(), **SCOPED}, scoped_user=True)[-1]
    assert (last.check, last.verdict) == ("training key", "fail")
    assert "own settings" in last.hint
    assert SCOPED["TORCHRELAY_SCOPED_SECRET_KEY"] not in last.detail + last.hint


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"TORCHRELAY_SECRET_KEY": "wrong-secret"}, "TORCHRELAY_SECRET_KEY"),
        ({"TORCHRELAY_ACCESS_KEY": "nobody"}, "TORCHRELAY_ACCESS_KEY"),
        ({"TORCHRELAY_ACCESS_KEY": ""}, "TORCHRELAY_ACCESS_KEY"),
        ({"TORCHRELAY_STORE": ""}, "TORCHRELAY_STORE"),
        ({"TORCHRELAY_STORE": "ftp://x"}, "s3://bucket/prefix"),
    ],
)
def test_wrong_settings_say_which(seaweed: SeaweedServer, changes: dict[str, str], told: str) -> None:
    """Each wrong setting ends in one failure whose hint names it, and no secret is shown."""
    environ = {**seaweed.environ(), **changes}
    last = examine("", environ)[-1]
    assert last.verdict == "fail"
    assert last.exit_code != 0
    assert told in last.hint
    assert seaweed.secret_key not in last.detail + last.hint


@pytest.mark.parametrize("options", [{"create_bucket": True}, {"scoped_user": True}])
def test_a_silent_server_is_a_failure_that_can_be_retried(seaweed: SeaweedServer, options: dict[str, bool]) -> None:
    """Nothing listens: the exit code says try again later."""
    environ = {**seaweed.environ(), **SCOPED, "TORCHRELAY_S3_ENDPOINT": UNUSED}
    last = examine("", environ, **options)[-1]
    assert (last.verdict, last.exit_code) == ("fail", 75)


def test_a_local_folder_is_a_store_too(tmp_path: Path) -> None:
    """No server at all: same checks, and the space that is left; keys do not exist there."""
    url = f"file://{tmp_path}/store"
    found = verdicts(examine(url, {}))
    assert {found[check] for check in ("read and write", "one winner")} == {"ok"}
    assert "space" in found
    assert examine(url, SCOPED, scoped_user=True)[-1].verdict == "fail"


def parse(*argv: str) -> argparse.Namespace:
    """Parse a command line as the CLI does."""
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    return parser.parse_args(["doctor", *argv])


def test_the_command_prints_a_line_per_finding_and_the_exit_code(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a log each finding is one line; the exit code is zero for a store that works."""
    for name, value in seaweed.environ("lines").items():
        monkeypatch.setenv(name, value)
    args = parse("--create-bucket", "--wait-s", "5")
    assert args.handler(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * len(lines)
    assert any("conditional write" in line for line in lines)
    monkeypatch.setenv("TORCHRELAY_SECRET_KEY", "wrong")
    args = parse()
    assert args.handler(args) == StoreAccessError.exit_code
    assert capsys.readouterr().out.splitlines()[-1].startswith("fail")


def test_the_policy_is_the_smallest_that_trains() -> None:
    """Two statements, five verbs, one bucket, no wildcard action."""
    policy = bucket_policy("b")
    actions = [action for statement in policy["Statement"] for action in statement["Action"]]
    resources = {resource for statement in policy["Statement"] for resource in statement["Resource"]}
    assert sorted(actions) == sorted(
        ["s3:ListBucket", "s3:GetBucketLocation", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
    )
    assert resources == {"arn:aws:s3:::b", "arn:aws:s3:::b/*"}
