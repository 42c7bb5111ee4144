"""Every backend keeps the contract: on files, in memory, and on real servers and the makers' own emulators."""

from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.storage import MemoryStore, ObjectStore, open_store
from everstep.testing import StoreContract

SMALL = 64 * 2**10


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore(part_size=SMALL)

    sweeps = False  # what a process leaves in memory goes with it


class TestLocalFiles(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return open_store(str(tmp_path / "store"), part_size=SMALL)


@pytest.mark.usefixtures("s3_server")
class TestS3(StoreContract):
    @pytest.fixture
    def store(self, place: Callable) -> ObjectStore:
        return place("s3_server").open()


@pytest.mark.usefixtures("careless_s3_server")
class TestS3ThatIgnoresConditions(StoreContract):
    conditional = False
    sweeps = False  # it cannot list uploads
    listed = 900  # its second page of a listing is an internal error

    @pytest.fixture
    def store(self, place: Callable) -> ObjectStore:
        return place("careless_s3_server").open()


@pytest.mark.usefixtures("gcs_server")
class TestGcs(StoreContract):
    sweeps = False  # sessions cannot be listed; they end by themselves after a week

    @pytest.fixture
    def store(self, place: Callable) -> ObjectStore:
        return place("gcs_server").open()


@pytest.mark.usefixtures("azure_server")
class TestAzure(StoreContract):
    sweeps = False  # uncommitted blocks cannot be deleted; they end by themselves after a week

    @pytest.fixture
    def store(self, place: Callable) -> ObjectStore:
        return place("azure_server").open()
