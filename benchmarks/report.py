"""How a benchmark reports: bars with their values, printed and written as JSON."""

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
    """One figure with its bar; ``value`` must be at most ``bar``."""

    figure: str
    value: float
    bar: float
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the bar is met."""
        return self.value <= self.bar


def report(name: str, bars: Sequence[Bar], *, out: Path | None = None) -> Path:
    """Print the bars and write them, with the machine, to ``benchmarks/out/<name>.json`` (or ``out``)."""
    for bar in bars:
        print(
            f"{'ok  ' if bar.holds else 'MISS'} {bar.figure}: {bar.value:.3g} (bar {bar.bar:g})  {json.dumps(bar.detail)}"
        )
    path = out or OUT / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"benchmark": name, "machine": _machine(), "bars": [{**asdict(bar), "holds": bar.holds} for bar in bars]}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return path


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
