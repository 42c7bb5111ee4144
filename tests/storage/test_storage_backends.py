"""Every backend keeps the contract: on files, in memory, and on real servers and the makers' own emulators."""

from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.storage import MemoryStore, NotFound, ObjectStore, StoreUnusable, open_store
from everstep.storage.backends.generic import GenericStore
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


@pytest.mark.long
@pytest.mark.usefixtures("careless_s3_server")
class TestS3ThatIgnoresConditions(StoreContract):
    conditional = False
    sweeps = False  # it cannot list uploads
    listed = 900  # its second page of a listing is an internal error
    whole = False  # it writes in place

    @pytest.fixture
    def store(self, place: Callable) -> ObjectStore:
        return place("careless_s3_server").open()


class SlowContract(StoreContract):
    """Of an emulator that takes seconds for what is large."""

    @pytest.mark.long
    def test_listing_of_several_pages_is_whole(self, store: ObjectStore) -> None:
        super().test_listing_of_several_pages_is_whole(store)

    @pytest.mark.long
    def test_create_of_the_largest_record_is_conditional_too(self, store: ObjectStore) -> None:
        super().test_create_of_the_largest_record_is_conditional_too(store)


@pytest.mark.usefixtures("gcs_server")
class TestGcs(SlowContract):
    sweeps = False  # sessions cannot be listed; they end by themselves after a week

    @pytest.fixture
    def store(self, place: Callable) -> ObjectStore:
        return place("gcs_server").open()


@pytest.mark.usefixtures("azure_server")
class TestAzure(SlowContract):
    sweeps = False  # uncommitted blocks cannot be deleted; they end by themselves after a week

    @pytest.fixture
    def store(self, place: Callable) -> ObjectStore:
        return place("azure_server").open()


def test_scheme_with_real_folders_gets_those_of_its_objects(tmp_path: Path) -> None:
    """As sftp and smb have them; here the local file system, through the backend that serves such schemes."""
    store = GenericStore(f"local://{tmp_path}/deep/store")
    store.create("log/0", b"record")
    store.put("data/1-a/0", b"shard")
    with store.open_write("data/1-a/1") as writer:
        writer.write(b"parts")
        writer.commit()
    assert [(o.name, o.size) for o in store.list()] == [("data/1-a/0", 5), ("data/1-a/1", 5), ("log/0", 6)]
    with pytest.raises(NotFound):
        store.get("data/1-a")


def test_bucket_that_is_missing_is_named_and_not_made() -> None:
    store = GenericStore("memory://no-such-bucket/run")
    file_system, _ = store.fs()
    file_system.pipe_file = _nothing_there
    with pytest.raises(StoreUnusable, match="The bucket of this URL does not exist"):
        store.put("log/0", b"record")
    assert not file_system.exists("/no-such-bucket")


def _nothing_there(path: str, *_: object, **__: object) -> None:
    raise FileNotFoundError(path)
