"""Servers that are started once for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from torchrelay.testing.servers import JuiceGateway, SeaweedServer

# How long an example takes says more about the machine than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A SeaweedFS server; give each test a prefix of its own."""
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def juice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JuiceGateway]:
    """JuiceFS' gateway, MinIO's front end without conditional writes."""
    with JuiceGateway(tmp_path_factory.mktemp("juice")) as server:
        yield server
