"""Names of content: any change changes them, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.data.dataset import DatasetVersion


def _of(*samples: Any) -> str:
    return DatasetVersion.of_samples("n", list(samples)).digest


def test_kinds_of_values_never_collide() -> None:
    """Values that print alike are told apart, and so are their groupings."""
    values: list[Any] = [1, 1.0, True, "1", b"1", None, (1,), [1], {1: 1}, {"1": 1}, 1j, np.int64(1), np.float32(1)]
    values += [
        torch.tensor(1),
        torch.tensor([1]),
        torch.tensor(1.0),
        np.array([1, 2]),
        np.array([[1, 2]]),
        (1, (2,)),
        ((1,), 2),
    ]
    digests = [_of(value) for value in values]
    assert len(set(digests)) == len(digests)
    assert _of("a", "bc") != _of("ab", "c")
    assert _of(1, 2) != _of(2, 1)


def test_layout_in_memory_does_not_matter() -> None:
    """The same numbers, transposed, strided or in the other byte order."""
    table = np.arange(12, dtype="<i4").reshape(3, 4)
    assert _of(table) == _of(np.asfortranarray(table)) == _of(table.astype(">i4"))
    tensor = torch.arange(12).reshape(3, 4)
    assert _of(tensor) == _of(tensor.t().contiguous().t())
    assert _of({"a": 1, "b": 2}) == _of({"b": 2, "a": 1})


def test_files_are_named_by_content_and_relative_name(tmp_path: Path) -> None:
    """A byte, a name, one file more: another digest. The place, the order and the time of writing: the same."""

    def make(folder: str, **files: bytes) -> str:
        for name, data in files.items():
            path = tmp_path / folder / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        paths = [path for path in (tmp_path / folder).rglob("*") if path.is_file()]
        one = DatasetVersion.of_files("n", paths, root=tmp_path / folder)
        assert one == DatasetVersion.of_files("n", reversed(paths), root=tmp_path / folder)
        assert one.num_samples == len(files)
        return one.digest

    base = make("one", a=b"1", sub__b=b"2")
    assert make("two", a=b"1", sub__b=b"2") == base
    others = [
        make("c", a=b"1", sub__b=b"3"),
        make("d", a=b"1", sub__c=b"2"),
        make("e", a=b"1", b=b"2"),
        make("f", a=b"12", sub__b=b""),
    ]
    assert len({base, *others}) == 5


def test_links_go_by_their_own_names(tmp_path: Path) -> None:
    """An alias inside the root, a link that leads out of it, a root that is a link: names and bytes count, not where they are kept."""
    plain, linked, elsewhere = (tmp_path / name for name in ("plain", "linked", "elsewhere"))
    for folder in (plain, linked, elsewhere):
        folder.mkdir()
    for name in ("a", "alias", "out"):
        (plain / name).write_bytes(b"2" if name == "out" else b"1")
    (linked / "a").write_bytes(b"1")
    (linked / "alias").symlink_to("a")
    (elsewhere / "x").write_bytes(b"2")
    (linked / "out").symlink_to(elsewhere / "x")
    (tmp_path / "door").symlink_to(linked)
    expected = DatasetVersion.of_files("n", plain.iterdir(), root=plain)
    for paths, root in ((linked, linked), (tmp_path / "door", tmp_path / "door"), (linked, tmp_path / "door")):
        assert DatasetVersion.of_files("n", paths.iterdir(), root=root) == expected


def test_files_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    """Two of one name without a root, one outside the root, one that is missing."""
    for name in ("x/a", "y/a"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match="same name"):
        DatasetVersion.of_files("n", [tmp_path / "x/a", tmp_path / "y/a"])
    with pytest.raises(ValueError, match="does not lie in"):
        DatasetVersion.of_files("n", [tmp_path / "x/a"], root=tmp_path / "y")
    with pytest.raises(OSError, match="nothing"):
        DatasetVersion.of_files("n", [tmp_path / "nothing"])


def test_a_digest_is_the_same_in_another_process() -> None:
    """No hash randomisation, no addresses."""
    code = "from torchrelay.data.dataset import DatasetVersion as D; print(D.of_samples('n', [{'a': 1, 'b': (2.5, 'x')}]).digest)"
    for hash_seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ)
        assert done.stdout.strip() == _of({"b": (2.5, "x"), "a": 1})


def test_digests_never_change(tmp_path: Path) -> None:
    """A run resumed by a later version must know its data again."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a").write_bytes(b"1")
    sample = {"image": np.arange(6, dtype=np.int16).reshape(2, 3), "label": 1, 2: ("x", b"y", None, 0.5, [True])}
    digests = [
        _of(sample, torch.tensor([[1.5]])),
        DatasetVersion.of_files("n", [tmp_path / "sub/a"], root=tmp_path).digest,
        DatasetVersion.of_bytes("n", b"abc", num_samples=3).digest,
    ]
    assert digests == [
        "33491984f7a6c091c27599e59e1a515a1570589ce0cdecaf89af409a1960d858",
        "3dd1c0bba08304027c7284e4f548979bbb04cae580340dcb7aa6083928c10954",
        "c8997f95a41fa69e8d18a1466b808940f1fa722c50f7671e3a663627f8cabc90",
    ]


@given(st.binary(min_size=1, max_size=64), st.data())
def test_bytes_are_named_by_every_bit(content: bytes, data: st.DataObject) -> None:
    """One bit, one byte more or less, another order: another digest. The type, the name and the number of samples: the same."""
    place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(content)
    flipped[place] ^= 1 << bit
    others = {bytes(flipped), content + b"\0", content[:-1], content[::-1]} - {content}
    digests = {DatasetVersion.of_bytes("n", other, num_samples=1).digest for other in others}
    digest = DatasetVersion.of_bytes("n", content, num_samples=1).digest
    assert len({digest, *digests}) == 1 + len(others)
    assert DatasetVersion.of_bytes("m", memoryview(bytearray(content)), num_samples=2).digest == digest


class _Random:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(1))


def test_random_samples_and_odd_objects_have_no_digest() -> None:
    """Said with what to do instead."""
    with pytest.raises(ValueError, match="augmentation"):
        DatasetVersion.of_samples("n", _Random())
    masked = np.ma.masked_array([1, 2], mask=[True, False])  # its mask would not count
    for odd in (object(), {1, 2}, {1j: 1, 2j: 2}, masked, np.array([object()]), torch.eye(2).to_sparse()):
        with pytest.raises(ValueError, match="sample 0"):
            _of(odd)


@pytest.mark.parametrize(
    ("name", "digest", "samples"), [("", "ab" * 32, 1), ("n", "AB" * 32, 1), ("n", "ab", 1), ("n", "ab" * 32, 0)]
)
def test_impossible_versions_are_refused(name: str, digest: str, samples: int) -> None:
    """A name, a digest and at least one sample."""
    with pytest.raises(ValueError, match="dataset"):
        DatasetVersion(name, digest, samples)
