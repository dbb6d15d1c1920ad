"""Components' nodes in two parts, as they travel from a rank to its courier: what stays the same from save to save, and what varies. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["join_nodes"]


def join_nodes(fixed: Mapping[str, Any], varying: Mapping[str, Any]) -> dict[str, Any]:
    """Join what is fixed and what varies of each component."""
    return {
        name: {**fixed[name], **varying.get(name, {})} if name in fixed else varying[name]
        for name in {**fixed, **varying}
    }
