"""The shipped conformance tests on every store there is."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from torchrelay.store.base import ObjectStore
from torchrelay.store.files import FileStore
from torchrelay.store.memory import MemoryStore
from torchrelay.testing.conformance import StoreConformance
from torchrelay.testing.servers import JuiceGateway, SeaweedServer


class TestMemory(StoreConformance):
    """A dictionary."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        """Empty."""
        return MemoryStore()


class TestFiles(StoreConformance):
    """A local folder."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        """Empty."""
        return FileStore(tmp_path / "store")


class TestSeaweed(StoreConformance):
    """S3 with conditional writes."""

    @pytest.fixture
    def store(self, seaweed: SeaweedServer) -> ObjectStore:
        """A prefix of its own."""
        return seaweed.open(f"conformance/{secrets.token_hex(6)}")

    def test_the_probe_finds_conditional_writes_and_checksums(self, store: ObjectStore) -> None:
        """SeaweedFS keeps both."""
        capabilities = store.probe()
        assert capabilities.create
        assert capabilities.checksum


class TestJuice(StoreConformance):
    """S3 by MinIO's front end, over JuiceFS."""

    @pytest.fixture
    def store(self, juice: JuiceGateway) -> ObjectStore:
        """A prefix of its own."""
        return juice.open(f"conformance/{secrets.token_hex(6)}")

    def test_the_probe_finds_that_conditions_are_ignored(self, store: ObjectStore) -> None:
        """The server answers 200 to both of two conditional writes; only measuring shows it."""
        assert not store.probe().create
