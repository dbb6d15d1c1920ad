"""How a benchmark reports: bars with their values, printed and written as JSON.

Each program writes its own file, and its bars replace those of the same figure in ``bars.json`` beside it, so that one file
says which bars of all programs hold.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Bar", "report"]

OUT = Path(__file__).parent / "out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One figure with its bar: ``value`` must be at most ``bar``, or at least where ``at_least`` says so."""

    figure: str
    value: float
    bar: float
    at_least: bool = False
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the bar is met."""
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def report(name: str, bars: Sequence[Bar], *, out: Path | None = None) -> Path:
    """Print the bars and write them, with the machine, to ``benchmarks/out/<name>.json`` (or ``out``).

    The bars also go into the ``bars.json`` of that folder; entries of other figures stay.
    """
    for bar in bars:
        verdict, limit = "ok  " if bar.holds else "MISS", "at least" if bar.at_least else "at most"
        print(f"{verdict} {bar.figure}: {bar.value:.3g} ({limit} {bar.bar:g})  {json.dumps(bar.detail)}")
    path = out or OUT / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"benchmark": name, "machine": _machine(), "bars": [{**asdict(bar), "holds": bar.holds} for bar in bars]}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    _merge(path.with_name("bars.json"), bars)
    print(f"written to {path}")
    return path


def _merge(path: Path, bars: Sequence[Bar]) -> None:
    """Replace the entries of these figures in the list of all bars; the file is swapped whole, never half written."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    new = {bar.figure: {**asdict(bar), "holds": bar.holds} for bar in bars}
    merged = [entry for entry in known if entry["figure"] not in new] + list(new.values())
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def _machine() -> str:
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    return (
        f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    )


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
