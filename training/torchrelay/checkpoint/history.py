"""Which checkpoints count: a pure function of the newest generation's record and the manifests' key names.

A generation begins at one committed manifest (or from scratch) and records its *lineage*: for each older generation on its
line of descent, the last step that counts. A zombie of an older generation may write what it likes: a manifest past the step
where its successor began is on no line, so it is invisible. A rollback is a new generation that begins earlier.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torchrelay.checkpoint.layout import (
    ManifestRef,
    damage_prefix,
    generation_key,
    generations_prefix,
    manifests_prefix,
    parse_generation_key,
    parse_manifest_key,
    parse_mark_key,
)
from torchrelay.checkpoint.sealed import seal, unseal
from torchrelay.errors import CorruptionError, FencedError
from torchrelay.store.base import Buffer, ObjectStore

__all__ = ["Generation", "History", "chain", "check_fence", "next_number", "read_history", "successor_lineage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One generation's record: who started it, from which checkpoint, and the line of descent that makes its history.

    ``lineage`` is ascending ``(generation, last step that counts)``. ``info`` says who, where and why (host, pid, origin, world size ...).
    """

    run_id: str
    number: int
    begin: ManifestRef | None
    lineage: tuple[tuple[int, int], ...]
    nonce: str
    info: dict[str, Any]
    token: str = ""

    @property
    def begin_step(self) -> int:
        """Step this generation continues from; 0 from scratch."""
        return self.begin.step if self.begin else 0

    @property
    def key(self) -> str:
        """Where the record lies."""
        return generation_key(self.run_id, self.number, self.token)

    def to_bytes(self) -> bytes:
        """Serialise, sealed."""
        begin = [self.begin.step, self.begin.generation] if self.begin else None
        body = {
            "run_id": self.run_id,
            "number": self.number,
            "begin": begin,
            "lineage": self.lineage,
            "nonce": self.nonce,
        }
        return seal("generation", {**body, "info": self.info})

    @classmethod
    def from_bytes(cls, data: Buffer, *, where: str) -> Generation:
        """Parse a record. Raises CorruptionError when it is not one."""
        body = unseal("generation", data, where=where)
        try:
            return cls(
                run_id=str(body["run_id"]),
                number=int(body["number"]),
                begin=ManifestRef(*map(int, body["begin"])) if body["begin"] else None,
                lineage=tuple((int(number), int(step)) for number, step in body["lineage"]),
                nonce=str(body["nonce"]),
                info=dict(body["info"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{where} is malformed: {error!r}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What the store says about a run: the newest readable generation, and the checkpoints on its line, oldest first.

    ``damaged`` are those marked as such; they are left out of ``line``. ``next_number`` is the number of the next generation. ``unreadable`` names
    generation records that could not be parsed.
    """

    newest: Generation | None
    line: tuple[ManifestRef, ...]
    damaged: frozenset[ManifestRef]
    next_number: int
    unreadable: tuple[str, ...] = ()

    @property
    def latest(self) -> ManifestRef | None:
        """The newest checkpoint that counts."""
        return self.line[-1] if self.line else None


def chain(newest: Generation | None, manifests: Iterable[ManifestRef]) -> tuple[ManifestRef, ...]:
    """Return the manifests on the line of the newest generation, ascending by step."""
    if newest is None:
        return ()
    refs, last = tuple(manifests), dict(newest.lineage)
    own = (ref for ref in refs if ref.generation == newest.number and ref.step > newest.begin_step)
    old = (ref for ref in refs if ref.generation in last and ref.step <= last[ref.generation])
    # Each older generation counts only after the step its own predecessor handed over at.
    floor = dict(
        zip([number for number, _ in newest.lineage], [0, *(step for _, step in newest.lineage)], strict=False)
    )
    return tuple(sorted([*(ref for ref in old if ref.step > floor[ref.generation]), *own]))


def successor_lineage(newest: Generation | None, begin: ManifestRef | None) -> tuple[tuple[int, int], ...]:
    """Return the lineage of a generation that begins at ``begin``, a manifest on the line of ``newest`` (or from scratch)."""
    if begin is None:
        return ()
    if newest is None:
        raise ValueError(f"cannot begin at {begin}: the run has no generation")
    older = tuple(pair for pair in newest.lineage if pair[0] < begin.generation)
    return (*older, (begin.generation, begin.step))


def next_number(generations: Iterable[int], manifests: Iterable[ManifestRef]) -> int:
    """Return a number above everything ever seen.

    Manifests count too: a store that forgot a generation record in a power cut may still hold its manifests, and they must never
    be taken for those of a later generation.
    """
    return max([0, *generations, *(ref.generation for ref in manifests)]) + 1


def read_history(store: ObjectStore, run_id: str) -> History:
    """Read the run's history: three listings and one object, whatever the number of generations and checkpoints."""
    manifests = [ref for key in _keys(store, manifests_prefix(run_id)) if (ref := parse_manifest_key(key))]
    damaged = frozenset(mark[1] for key in _keys(store, damage_prefix(run_id)) if (mark := parse_mark_key(key)))
    names = sorted(name for key in _keys(store, generations_prefix(run_id)) if (name := parse_generation_key(key)))
    unreadable = []
    newest = None
    # Of two records of one number (only where the store cannot create) the smaller token is the generation; the other one gave up.
    for number in sorted({name.number for name in names}, reverse=True):
        token = min(name.token for name in names if name.number == number)
        key = generation_key(run_id, number, token)
        try:
            newest = replace(Generation.from_bytes(store.get(key), where=key), token=token)
            break
        except CorruptionError:
            unreadable.append(key)
    line = tuple(ref for ref in chain(newest, manifests) if ref not in damaged)
    number = next_number((name.number for name in names), manifests)
    return History(newest=newest, line=line, damaged=damaged, next_number=number, unreadable=tuple(unreadable))


def check_fence(store: ObjectStore, run_id: str, number: int) -> None:
    """Raise FencedError if a generation newer than ``number`` exists."""
    # No limit: what follows is nothing, or little, and the first of it may be an object that is not ours.
    later = store.list(generations_prefix(run_id), after=generation_key(run_id, number)).objects
    newest = max((name.number for item in later if (name := parse_generation_key(item.key))), default=0)
    if newest > number:
        raise FencedError(f"generation {number} of run {run_id!r} has been succeeded by generation {newest}")


def _keys(store: ObjectStore, prefix: str) -> list[str]:
    return [item.key for item in store.list(prefix).objects]
