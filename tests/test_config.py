"""The spec: read from TOML, arguments and JSON; every mistake is named with its place and what was probably meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchrelay.config import RunSpec, TrainSpec, load_spec, parse_spec, spec_to_dict
from torchrelay.errors import ConfigError


def test_a_spec_survives_the_way_through_json() -> None:
    """What the flow hands to the launcher is what the user wrote."""
    spec = TrainSpec(run=RunSpec(run_id="a", options={"x": [1, {"y": None}], "z": 0.5}), segment_steps=7)
    assert parse_spec(json.loads(json.dumps(spec_to_dict(spec)))) == spec


def test_a_file_and_arguments(tmp_path: Path) -> None:
    """Arguments win over the file; nested fields by dots."""
    path = tmp_path / "spec.toml"
    path.write_text('segment_steps = 5\n[run]\nrun_id = "a"\ntotal_steps = 9\n[run.options]\nwidth = 3\n')
    spec = load_spec(path, {"run.total_steps": 11, "world.ranks": 2, "run.options.depth": 4})
    assert (spec.segment_steps, spec.run.total_steps, spec.world.ranks) == (5, 11, 2)
    assert spec.run.options == {"width": 3, "depth": 4}
    assert load_spec(None, {"run.run_id": "b"}).run.run_id == "b"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"run": {"run_id": "a", "totl_steps": 3}}, "did you mean 'total_steps'"),
        ({"run": {"run_id": "a"}, "segments": 3}, "segment_steps"),
        ({"run": {"run_id": "a"}, "qqqqq": 3}, "known fields"),
        ({"run": {"run_id": "a", "total_steps": "10"}}, "run: total_steps must be of type int, not str"),
        ({"run": {"run_id": "a", "total_steps": True}}, "must be of type int, not bool"),
        ({"run": {"run_id": "a", "total_steps": 1.5}}, "must be of type int, not float"),
        ({"run": {"run_id": "a", "total_steps": 0}}, "total_steps must be at least 1"),
        ({"run": {"run_id": "a", "seed": -1}}, "seed"),
        ({"run": {"run_id": "a", "job": "no colon"}}, "package.module:function"),
        ({"run": {"run_id": "a", "options": {"x": float("nan")}}}, "plain JSON"),
        ({"run": 3}, "must be a table"),
        ({}, "run"),
        ({"run": {"run_id": "a", "global_batch": 2}, "world": {"ranks": 3}}, "without a sample"),
        ({"run": {"run_id": "a"}, "world": {"ranks": 0}}, "ranks must be between"),
        ({"run": {"run_id": "a"}, "world": {"device": "tpu"}}, "cpu or cuda"),
        ({"run": {"run_id": "a"}, "save": {"interval_steps": 10, "loss_bound_steps": 5}}, "loss_bound_steps"),
        ({"run": {"run_id": "a"}, "faults": {"lease_s": 0}}, "lease_s must be positive"),
        ({"run": {"run_id": "a"}, "store": "s3://key:secret@bucket/x"}, "credentials"),
    ],
)
def test_mistakes_are_named(tree: dict[str, Any], words: str) -> None:
    """Place, field, and what would have been right."""
    with pytest.raises(ConfigError) as caught:
        parse_spec(tree)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "run_id", ["../x", "a b", "x" * 300, "", "A", "-a", "a/b", "a..b", ".a", "a\n", "ä", "a\x00", "x" * 81]
)
def test_odd_names_are_refused(run_id: str) -> None:
    """A name becomes part of keys, folders and pages; the message does not repeat 300 characters."""
    with pytest.raises(ConfigError, match="run_id") as caught:
        parse_spec({"run": {"run_id": run_id}})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("run_id", ["a", "0", "gpt-2.1_b", "x" * 80])
def test_plain_names_are_fine(run_id: str) -> None:
    """All that is allowed."""
    assert parse_spec({"run": {"run_id": run_id}}).run.run_id == run_id


@pytest.mark.parametrize("content", [b"run_id = ", b"\xff\xfe", b"[run"])
def test_files_that_are_no_toml(tmp_path: Path, content: bytes) -> None:
    """The path is in the message."""
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_spec(path)
    with pytest.raises(ConfigError, match="no such spec file"):
        load_spec(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_spec(tmp_path)


def test_the_identity_is_what_is_trained_and_nothing_else() -> None:
    """Two starts that differ in how they run are one run; any field of the run makes another."""
    base = RunSpec(run_id="a", options={"a": 1, "b": 2})
    assert base.digest() == RunSpec(run_id="a", options={"b": 2, "a": 1}).digest()
    others = [RunSpec(run_id="b"), RunSpec(run_id="a", seed=1), RunSpec(run_id="a", options={"a": 1})]
    assert len({base.digest(), *(other.digest() for other in others)}) == 4
