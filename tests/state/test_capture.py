"""What is captured, what is refused, and that it comes back equal."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.checkpoint.typed import decode
from torchrelay.errors import StateMismatchError, UnserialisableError
from torchrelay.state.capture import TrainingState, tensor_meta
from torchrelay.state.describe import Describer
from torchrelay.state.rng import capture_rng, derive_rng, restore_rng


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


class _Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def _table(state: TrainingState, step: int = 0) -> dict[str, TensorMeta]:
    return {name: tensor_meta(tensor) for name, tensor in Describer(state).capture(step).tensors.items()}


def test_tied_weights_are_one_tensor() -> None:
    """Two names of one parameter are stored once and referenced twice."""
    captured = Describer(TrainingState(model=_Tied())).capture(1)
    assert "model/embed.weight" in captured.tensors
    assert "model/head.weight" not in captured.tensors
    assert captured.skeleton["model"]["head.weight"] == {"$tensor": "model/embed.weight"}


def test_buffers_are_never_copied_lazily() -> None:
    """Forward changes BatchNorm buffers, so only parameters and optimizer moments may wait for the background copy."""
    model = _Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.norm(model.embed(torch.arange(4))).sum().backward()
    optimizer.step()
    instant = TrainingState(model=model, optimizer=optimizer).hold(1)
    live = {id(tensor) for tensor in instant.live}
    assert id(model.norm.running_mean) not in live
    assert len(instant.copies) == 3
    assert id(model.embed.weight) in live
    assert {id(each["exp_avg"]) for each in optimizer.state.values()} <= live


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, 2: "b", (3, 4): None},
        [1.5, float("inf"), -0.0, True, "text", b"bytes", {1, 2}, frozenset({"x"}), 3 + 4j],
        Counter({30: 1, 80: 2}),
        OrderedDict([("z", 1), ("a", [torch.ones(2), torch.tensor(3)])]),
        (np.arange(5, dtype=np.int16), np.float32(1.5), np.zeros((0, 3))),
        {"$tensor": "not a tensor"},
    ],
)
def test_typed_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    """Whatever a component may hold is the same after a round trip through JSON."""
    holder = _Holder(value)
    state = TrainingState(model=nn.Linear(1, 1), extra={"holder": holder})
    captured = Describer(state).capture(1)
    holder.value = None
    trees = {name: decode(node, lambda ref: captured.tensors[ref].clone()) for name, node in captured.skeleton.items()}
    state.load(trees, {})
    assert type(holder.value) is type(value)
    assert repr(holder.value) == repr(value)


@pytest.mark.parametrize("value", [object(), lambda: None, torch.nn.Linear(1, 1), np.array([object()]), type])
def test_what_has_no_encoding_is_refused_with_its_path(value: Any) -> None:
    """Nothing is pickled: an unknown object is named when it is saved, not missed when it is needed."""
    state = TrainingState(model=nn.Linear(1, 1), extra={"holder": _Holder([1, {"deep": value}])})
    with pytest.raises(UnserialisableError, match=r"holder\.value\[1\]\.deep"):
        Describer(state).capture(1)


def test_sparse_and_meta_tensors_are_refused() -> None:
    """A tensor without plain bytes is refused."""
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(UnserialisableError):
            Describer(TrainingState(model=nn.Linear(1, 1), extra={"holder": _Holder(tensor)})).capture(1)


def test_rng_of_all_three_libraries_continues() -> None:
    """Captured streams go on where they were."""
    state = capture_rng()
    first = (random.random(), np.random.rand(), torch.rand(1).item())
    restore_rng(state)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first


def test_derived_streams_differ_by_rank_and_step_and_repeat() -> None:
    """The rule for a changed world size is a function of (seed, step, rank)."""

    def draw(seed: int, step: int, rank: int) -> tuple[float, float, float]:
        derive_rng(seed, step=step, rank=rank)
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    draws = {draw(7, step, rank) for step in (0, 1) for rank in (0, 1, 2)}
    assert len(draws) == 6
    assert draw(7, 1, 2) in draws


def test_a_program_that_does_not_fit_is_refused_before_anything_is_read() -> None:
    """Shape, dtype, missing and unexpected names and components are all named."""
    saved = TrainingState(model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    captured, table = Describer(saved).capture(1), _table(saved)
    wrong_shape = TrainingState(model=nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)))
    with pytest.raises(
        StateMismatchError, match=r"model\.0\.weight is float32\[3, 2\] in the checkpoint, float32\[4, 2\] here"
    ):
        wrong_shape.check_fits(table, captured.skeleton)
    wrong_type = TrainingState(model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double())
    with pytest.raises(StateMismatchError, match="float64"):
        wrong_type.check_fits(table, captured.skeleton)
    more = TrainingState(
        model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1)), extra={"other": _Holder(1)}
    )
    with pytest.raises(StateMismatchError, match=r"no 'other'.*2\.weight is not in the checkpoint"):
        more.check_fits(table, captured.skeleton)


def test_per_rank_state_comes_back_to_its_rank() -> None:
    """Per-rank components and the RNG travel in the rank's own record."""
    holder = _Holder({"count": 3, "noise": torch.arange(3.0)})
    state = TrainingState(model=nn.Linear(1, 1), per_rank={"holder": holder})
    local = Describer(state).capture(1).local
    expected = torch.rand(2)
    holder.value = None
    state.load_local(local)
    assert holder.value["count"] == 3
    assert torch.equal(holder.value["noise"], torch.arange(3.0))
    assert torch.equal(torch.rand(2), expected)


def test_a_state_that_contains_itself_is_refused_by_name() -> None:
    """Not a crash deep in the interpreter."""
    loop: dict[str, Any] = {}
    loop["self"] = loop

    class _Loop:
        def state_dict(self) -> dict[str, Any]:
            return loop

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError

    with pytest.raises(UnserialisableError, match="state of knot contains itself"):
        Describer(TrainingState(model=nn.Linear(1, 1), extra={"knot": _Loop()})).capture(1)
