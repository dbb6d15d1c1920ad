"""Every key name of the bucket, and the sizes of the format.

Nothing else in the project spells a key. Names are padded so that byte order is numeric order. ``parse_*`` return None for
keys that are not ours, so that foreign objects in the bucket can do no harm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "CHUNK_BYTES",
    "DTYPES",
    "PACK_BYTES",
    "GenerationKey",
    "ManifestRef",
    "damage_key",
    "damage_prefix",
    "forgotten_key",
    "forgotten_prefix",
    "generation_key",
    "generations_prefix",
    "index_prefix",
    "interval_ledger_key",
    "interval_ledger_prefix",
    "lease_key",
    "manifests_prefix",
    "pack_key",
    "packs_prefix",
    "parse_generation_key",
    "parse_interval_ledger_key",
    "parse_lease_key",
    "parse_manifest_key",
    "parse_mark_key",
    "parse_pack_key",
    "parse_record_key",
    "parse_run_key",
    "pin_key",
    "pins_prefix",
    "record_key",
    "records_prefix",
    "run_key",
    "run_prefix",
    "verified_key",
    "verified_prefix",
]

CHUNK_BYTES = 4 * 2**20
"""Largest chunk: the unit of hash and of reading. A multiple of every element size."""

PACK_BYTES = 64 * 2**20
"""Largest pack object, header included: one PUT, so no multipart upload and no debris."""

DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("U8", 1),
    "float8_e5m2fnuz": ("U8", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
    "complex128": ("U8", 16),
}
"""Element type (PyTorch's name) -> its code in a safetensors header, and its size in bytes. Types unknown to safetensors are stored as bytes."""

_STEP_GENERATION = r"(?P<step>\d{12,})-g(?P<generation>\d{6,})"
_MANIFEST = re.compile(rf"runs/[^/]+/manifests/{_STEP_GENERATION}\.json")
_GENERATION = re.compile(r"runs/[^/]+/generations/(?P<number>\d{6,})(\.(?P<token>[0-9a-f]+))?\.json")
_INTERVALS = re.compile(r"runs/[^/]+/ledger/intervals/(?P<number>\d{6,})\.json")
_LEASE = re.compile(r"runs/[^/]+/leases/(?P<number>\d{6,})\.json")
_MARK = re.compile(
    rf"runs/[^/]+/(?P<folder>verdicts/damaged|verdicts/verified|pins|forgotten)/{_STEP_GENERATION}\.json"
)
_PACK = re.compile(rf"runs/[^/]+/packs/{_STEP_GENERATION}/[0-9a-f]{{32}}\.safetensors")
_RECORD = re.compile(rf"runs/[^/]+/records/{_STEP_GENERATION}/rank-(?P<rank>\d+)-of-(?P<world>\d+)\.json")


@dataclass(frozen=True, order=True, slots=True)
class ManifestRef:
    """Names one checkpoint of a run: its step, and the generation that wrote it."""

    step: int
    generation: int

    def __str__(self) -> str:
        return f"{self.step:012d}-g{self.generation:06d}"

    def key(self, run_id: str) -> str:
        """Key of the manifest object."""
        return f"{manifests_prefix(run_id)}{self}.json"


@dataclass(frozen=True, order=True, slots=True)
class GenerationKey:
    """A generation record's name. ``token`` is empty unless the store cannot create (then names are unique)."""

    number: int
    token: str


def run_prefix(run_id: str) -> str:
    """Everything of a run but its document lies under this prefix."""
    return f"runs/{run_id}/"


def index_prefix() -> str:
    """Folder with one document per run. It has no folders in it, so that one listing, in whatever order, names all runs and nothing else."""
    return "index/"


def run_key(run_id: str) -> str:
    """RunSpec and provenance; created once."""
    return f"{index_prefix()}{run_id}.json"


def parse_run_key(key: str) -> str | None:
    """Read the run's name from its document's key."""
    match = re.fullmatch(r"index/([^/]+)\.json", key)
    return match[1] if match else None


def generations_prefix(run_id: str) -> str:
    """Folder of generation records."""
    return f"{run_prefix(run_id)}generations/"


def generation_key(run_id: str, number: int, token: str = "") -> str:
    """Record of one generation; created once, and winning that creation starts the generation."""
    return f"{generations_prefix(run_id)}{number:06d}{'.' + token if token else ''}.json"


def lease_key(run_id: str, number: int) -> str:
    """Lease of one generation; written by its own launcher only."""
    return f"{run_prefix(run_id)}leases/{number:06d}.json"


def packs_prefix(run_id: str, ref: ManifestRef | None = None) -> str:
    """Folder of packs; of those that one checkpoint wrote, if given."""
    return f"{run_prefix(run_id)}packs/" + (f"{ref}/" if ref else "")


def pack_key(run_id: str, home: ManifestRef, digest: str) -> str:
    """A pack, named by its content (XXH3-128, hex) below the checkpoint that wrote it: no other checkpoint ever writes this key."""
    return f"{packs_prefix(run_id, home)}{digest}.safetensors"


def parse_pack_key(key: str) -> ManifestRef | None:
    """Read from a pack's key which checkpoint wrote it."""
    match = _PACK.fullmatch(key)
    return ManifestRef(int(match["step"]), int(match["generation"])) if match else None


def records_prefix(run_id: str, ref: ManifestRef | None = None) -> str:
    """Folder of shard records; of one step and generation if given."""
    return f"{run_prefix(run_id)}records/" + (f"{ref}/" if ref else "")


def record_key(run_id: str, ref: ManifestRef, rank: int, world_size: int) -> str:
    """What one rank wrote for one step."""
    return f"{records_prefix(run_id, ref)}rank-{rank}-of-{world_size}.json"


def manifests_prefix(run_id: str) -> str:
    """Folder of manifests."""
    return f"{run_prefix(run_id)}manifests/"


def damage_prefix(run_id: str) -> str:
    """Folder of damage markers."""
    return f"{run_prefix(run_id)}verdicts/damaged/"


def damage_key(run_id: str, ref: ManifestRef) -> str:
    """Marks a checkpoint that was found damaged: loads step over it until ``verify`` finds it whole again."""
    return f"{damage_prefix(run_id)}{ref}.json"


def verified_prefix(run_id: str) -> str:
    """Folder of marks of verification."""
    return f"{run_prefix(run_id)}verdicts/verified/"


def verified_key(run_id: str, ref: ManifestRef) -> str:
    """Marks a checkpoint of which every byte was read back and checked."""
    return f"{verified_prefix(run_id)}{ref}.json"


def pins_prefix(run_id: str) -> str:
    """Folder of pins."""
    return f"{run_prefix(run_id)}pins/"


def pin_key(run_id: str, ref: ManifestRef) -> str:
    """Marks a checkpoint that a person wants to keep."""
    return f"{pins_prefix(run_id)}{ref}.json"


def forgotten_prefix(run_id: str) -> str:
    """Folder of what is left of forgotten checkpoints."""
    return f"{run_prefix(run_id)}forgotten/"


def forgotten_key(run_id: str, ref: ManifestRef) -> str:
    """What is left of a forgotten checkpoint: the losses that its manifest kept, and why it went."""
    return f"{forgotten_prefix(run_id)}{ref}.json"


def interval_ledger_prefix(run_id: str) -> str:
    """Folder of the save intervals that each generation chose."""
    return f"{run_prefix(run_id)}ledger/intervals/"


def interval_ledger_key(run_id: str, number: int) -> str:
    """Intervals that one generation chose, and why; written by its own launcher only."""
    return f"{interval_ledger_prefix(run_id)}{number:06d}.json"


def parse_interval_ledger_key(key: str) -> int | None:
    """Read the generation from the key of its intervals."""
    match = _INTERVALS.fullmatch(key)
    return int(match["number"]) if match else None


def parse_manifest_key(key: str) -> ManifestRef | None:
    """Read step and generation from a manifest's key."""
    match = _MANIFEST.fullmatch(key)
    return ManifestRef(int(match["step"]), int(match["generation"])) if match else None


def parse_mark_key(key: str) -> tuple[str, ManifestRef] | None:
    """Read from the key of a mark its folder (``verdicts/damaged``, ``verdicts/verified``, ``pins`` or ``forgotten``) and the checkpoint."""
    match = _MARK.fullmatch(key)
    return (match["folder"], ManifestRef(int(match["step"]), int(match["generation"]))) if match else None


def parse_lease_key(key: str) -> int | None:
    """Read the generation from a lease's key."""
    match = _LEASE.fullmatch(key)
    return int(match["number"]) if match else None


def parse_generation_key(key: str) -> GenerationKey | None:
    """Read the number (and token) from a generation record's key."""
    match = _GENERATION.fullmatch(key)
    return GenerationKey(int(match["number"]), match["token"] or "") if match else None


def parse_record_key(key: str) -> tuple[ManifestRef, int, int] | None:
    """Read (checkpoint, rank, world size) from a shard record's key."""
    match = _RECORD.fullmatch(key)
    if not match:
        return None
    return ManifestRef(int(match["step"]), int(match["generation"])), int(match["rank"]), int(match["world"])
