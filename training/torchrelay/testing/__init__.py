"""What others need to test their stores and jobs with torchrelay: shipped, and resolved when first used."""

from __future__ import annotations

import importlib

_HOMES = {
    "ChaosProxy": "torchrelay.testing.chaos_proxy",
    "FakeClock": "torchrelay.testing.clock",
    "FaultyStore": "torchrelay.testing.faulty_store",
    "JuiceGateway": "torchrelay.testing.servers",
    "SeaweedServer": "torchrelay.testing.servers",
    "SimulatedCrash": "torchrelay.testing.faulty_store",
    "StoreConformance": "torchrelay.testing.conformance",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the table is the list


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'torchrelay.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
