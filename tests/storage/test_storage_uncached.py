"""Writes around the page cache: whatever the memory, sizes and file system, the file holds the bytes."""

import mmap
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.storage.backends.local import BLOCK, LEAST, LocalStore, UncachedWriter
from support.processes.descriptors import opened

NAME = "data/x"


def pages(size: int) -> mmap.mmap:
    """Page-aligned memory that holds something."""
    found = mmap.mmap(-1, size)
    found.write((bytes(range(251)) * (size // 251 + 1))[:size])
    return found


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on the disk, and one on a tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("extra", [0, 1, BLOCK - 1, BLOCK + 17])
def test_object_of_any_size_from_any_memory_is_whole(root: Path, shift: int, extra: int) -> None:
    part = 2 * LEAST
    store = LocalStore(root, part)
    size = 3 * part + extra
    with memoryview(pages(size + shift))[shift:] as data:
        upload = store.start_upload(NAME, size)
        for number in reversed(range(-(-size // part))):  # in whatever order they come
            upload.write_part(number, data[number * part : (number + 1) * part])
        upload.commit()
        assert store.get(NAME) == data


def test_aligned_pages_are_written_without_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch()
    writer = UncachedWriter(path)
    data = memoryview(pages(LEAST + 100))
    done = writer.write(0, data)
    writer.close()
    # All whole blocks where the file system under the tests can do it, nothing where it cannot.
    assert done in (LEAST, 0)
    assert path.read_bytes() == data[:done]


def test_small_and_unaligned_writes_are_left_to_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch()
    writer = UncachedWriter(path)
    assert writer.write(0, memoryview(pages(LEAST - 1))) == 0
    assert writer.write(512, memoryview(pages(LEAST))) == 0
    writer.close()
    assert path.read_bytes() == b""


def open_below(folder: Path) -> list[str]:
    """What this process has open below `folder`; other tests of the process may close theirs at any moment."""
    return [path for path in opened().values() if path.startswith(f"{folder}/")]


@pytest.mark.parametrize("act", ["commit", "abort"])
def test_upload_that_is_over_leaves_no_descriptor_open(tmp_path: Path, act: str) -> None:
    upload = LocalStore(tmp_path, LEAST).start_upload("data/x")
    upload.write_part(0, pages(LEAST))  # type: ignore[arg-type]
    assert open_below(tmp_path)  # or the last line would say nothing
    getattr(upload, act)()
    assert open_below(tmp_path) == []
