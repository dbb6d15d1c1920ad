"""Tensors of every type and form, many small ones and a very large one: through a real courier and back, bit for bit."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay.checkpoint.layout import DTYPES, PACK_BYTES, packs_prefix, run_prefix
from torchrelay.errors import UnserialisableError
from torchrelay.state.capture import TrainingState
from torchrelay.state.checkpointer import Checkpointer
from torchrelay.store import open_store

_FORMS = ("plain", "scalar", "empty", "transposed", "strided", "offset")


def _random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bytes as elements: nan of every payload and negative zeros are among them; of bool only the two that there are."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).bool()
    item = torch.empty((), dtype=dtype).element_size()
    count = int(torch.Size(shape).numel())
    return torch.randint(0, 256, (count * item,), dtype=torch.uint8).view(dtype).reshape(shape)


def _formed(dtype: torch.dtype, form: str) -> torch.Tensor:
    if form == "scalar":
        return _random(dtype, ())
    if form == "empty":
        return _random(dtype, (0, 3))
    if form == "transposed":
        return _random(dtype, (5, 7)).t()
    if form == "strided":
        return _random(dtype, (6, 8))[::2, 1::3]
    return _random(dtype, (9, 4))[2:] if form == "offset" else _random(dtype, (3, 5))


class _Zoo(nn.Module):
    """Every type in every form, as parameters and as buffers."""

    def __init__(self) -> None:
        super().__init__()
        for name in DTYPES:
            for form in _FORMS:
                value = _formed(getattr(torch, name), form)
                self.register_parameter(f"p_{name}_{form}", nn.Parameter(value, requires_grad=False))
                self.register_buffer(f"b_{name}_{form}", _formed(getattr(torch, name), form))
        self.conjugate = nn.Parameter(_random(torch.complex64, (4, 3)).conj(), requires_grad=False)
        self.turned = nn.Buffer(_random(torch.complex128, (4,)).conj())
        self.negative = nn.Buffer(torch._neg_view(torch.randn(3)))


def _bits(module: nn.Module) -> dict[str, bytes]:
    return {name: _bytes(value) for name, value in module.state_dict().items()}


def _bytes(value: torch.Tensor) -> bytes:
    plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


def _through(store: str, saved: TrainingState, loaded: TrainingState) -> None:
    """Save one, then restore into the other as a program that starts anew, and that can save in turn."""
    with Checkpointer(saved, run="r", store=store) as checkpointer:
        assert checkpointer.restore() is None
        assert checkpointer.save(1).result(120) == 1
    with Checkpointer(loaded, run="r", store=store) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 1
        assert checkpointer.save(2).result(120) == 2


class _Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def test_every_type_in_every_form(tmp_path: Path) -> None:
    """Parameters and buffers: bf16, fp8, complex (conjugate too), bool, scalars, empty and scattered ones; forms stay as the program has them."""
    torch.manual_seed(1)
    first, second = _Zoo(), _Zoo()
    expected = _bits(first)
    assert _bits(second) != expected
    strides = {name: value.stride() for name, value in second.state_dict().items()}
    _through(f"file://{tmp_path}", TrainingState(model=first), TrainingState(model=second))
    assert _bits(second) == expected
    assert _bits(first) == expected
    assert {name: value.stride() for name, value in second.state_dict().items()} == strides


def test_every_type_in_other_components(tmp_path: Path) -> None:
    """Tensors of the state of anything else, replicated and per rank: the same values, types and shapes."""
    torch.manual_seed(2)
    values = {f"{name}/{form}": _formed(getattr(torch, name), form) for name in DTYPES for form in _FORMS}
    values["conjugate"] = _random(torch.complex64, (4, 3)).conj()
    first, own = _Holder(values), _Holder(dict(values))
    second, second_own = _Holder(None), _Holder(None)
    model = nn.Linear(1, 1)
    _through(
        f"file://{tmp_path}",
        TrainingState(model=model, extra={"a": first}, per_rank={"b": own}),
        TrainingState(model=model, extra={"a": second}, per_rank={"b": second_own}),
    )
    for found in (second.value, second_own.value):
        assert {key: (value.dtype, value.shape, _bytes(value)) for key, value in found.items()} == {
            key: (value.dtype, value.shape, _bytes(value)) for key, value in values.items()
        }


class _Tied(nn.Module):
    """A weight with two names, and a buffer with two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Buffer(torch.randn(3))
        self.other = nn.Buffer(self.scale)
        self.other = self.scale


def test_what_is_shared_stays_shared_and_what_is_not_does_not(tmp_path: Path) -> None:
    """Tied weights, also of model and average: stored once, and the ties are there after a restore."""

    def build() -> tuple[TrainingState, _Tied, nn.Module]:
        model = _Tied()
        ema = nn.Sequential(nn.Linear(4, 7, bias=False), nn.Linear(2, 2))
        ema[0].weight = model.embed.weight
        optimizer = torch.optim.AdamW(model.parameters())
        model.head(model.embed(torch.arange(5))).square().mean().backward()
        optimizer.step()
        return TrainingState(model=model, optimizer=optimizer, ema=ema), model, ema

    (first, model, ema), (second, again, again_ema) = build(), build()
    store = f"file://{tmp_path}"
    _through(store, first, second)
    assert (_bits(again), _bits(again_ema)) == (_bits(model), _bits(ema))
    assert again.head.weight is again.embed.weight
    assert again.other.data_ptr() == again.scale.data_ptr()
    assert again_ema.get_parameter("0.weight") is again.embed.weight
    # A program without the ties gets the values in each place, and they stay apart.
    apart, average = _Tied(), nn.Sequential(nn.Linear(4, 7, bias=False), nn.Linear(2, 2))
    apart.head.weight = nn.Parameter(torch.zeros(7, 4))
    untied = TrainingState(model=apart, optimizer=torch.optim.AdamW(again.parameters()), ema=average)
    with Checkpointer(untied, run="r", store=store) as checkpointer:
        assert checkpointer.restore() is not None
    assert (_bits(apart), _bits(average)) == (_bits(model), _bits(ema))
    assert apart.head.weight.data_ptr() != apart.embed.weight.data_ptr()
    assert average.get_parameter("0.weight").data_ptr() != apart.embed.weight.data_ptr()


@pytest.mark.parametrize("name", ["complex32", "float4_e2m1fn_x2"])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_type_that_the_format_lacks_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """At the start, before a step is lost, and naming the tensor."""
    model = nn.Linear(1, 1)
    model.register_buffer("odd", torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name)))
    checkpointer = Checkpointer(TrainingState(model=model), run="r", store=f"file://{tmp_path}")
    with pytest.raises(UnserialisableError, match=rf"model/odd has elements of torch\.{name}"):
        checkpointer.restore()
    checkpointer.close()


def test_five_thousand_small_tensors_make_few_objects(tmp_path: Path) -> None:
    """They come back bit for bit, and the store holds a handful of objects for them, not thousands."""
    torch.manual_seed(3)

    def build() -> nn.ParameterList:
        return nn.ParameterList([nn.Parameter(torch.randn(1 + number % 37)) for number in range(5000)])

    first, second = build(), build()
    _through(f"file://{tmp_path}", TrainingState(model=first), TrainingState(model=second))
    assert _bits(second) == _bits(first)
    objects = open_store(f"file://{tmp_path}").list(run_prefix("r")).objects
    assert len(objects) <= 12, [item.key for item in objects]


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_two_gib_in_one_tensor(tmp_path: Path) -> None:
    """Longer than 32-bit sizes reach: packs stay within their limit, and every byte comes back."""
    size = 2**31 + 2**20
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    if int(lines["MemAvailable"].split()[0]) * 1024 < 4 * size:
        pytest.skip("too little memory")

    class _Large(nn.Module):
        def __init__(self, value: torch.Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(value, requires_grad=False)

    torch.manual_seed(4)
    block = torch.randint(0, 256, (2**20,), dtype=torch.uint8)
    first = _Large(torch.cat([block ^ (number % 251) for number in range(size // 2**20)]).view(-1, 2**12))
    expected = _hash(first.weight)
    url = f"file://{tmp_path}"
    with Checkpointer(TrainingState(model=first), run="r", store=url) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1).result(200)
    packs = open_store(url).list(packs_prefix("r")).objects
    assert max(item.size_bytes for item in packs) <= PACK_BYTES
    del first
    second = _Large(torch.zeros(size // 2**12, 2**12, dtype=torch.uint8))
    with Checkpointer(TrainingState(model=second), run="r", store=url) as checkpointer:
        checkpointer.restore()
    assert _hash(second.weight) == expected
    shutil.rmtree(tmp_path)


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().data).hexdigest()
