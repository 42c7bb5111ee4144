"""The narrow object-store protocol that everything else is written against.

Names are relative, `/`-separated and never leave the store's prefix: `check_name` is the one gate, and every backend
passes each name through it, whoever wrote the name (a manifest read from the store included).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from everstep.storage.errors import InvalidName, Truncated
from everstep.storage.upload import Data, ObjectWriter, SpooledUpload, Upload

MAX_NAME = 512
MAX_PARTS = 10_000  # S3's bound
PART_SIZE = 16 * 2**20


@dataclass(frozen=True, slots=True, order=True)
class ObjectInfo:
    """One listed object: its name relative to the store and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A store's capabilities. Known without I/O, so they say what the backend offers, not what the server grants.

    `multipart`: a writer's parts go to the store as they come, so a crash may leave some behind for `sweep_uploads`;
    without it they wait on the local disk. `parallel_parts`: the parts of one upload may be written in any order and at
    once. `part_size`: bytes of each part but the last, unless a size hint asks for larger ones. `read_size`: the bytes
    that a reader with a choice should ask for at once: less costs requests, more costs memory and caches. `local`: this
    machine's cores write the parts, so that more threads than there are cores to spare slow down what else runs.
    `listable`: `list` gives what is there; else objects must be asked for by their names. `whole`: an object is visible
    only with all its bytes; else a reader may meet one that is still being written.
    """

    multipart: bool = True
    parallel_parts: bool = True
    writable: bool = True
    part_size: int = PART_SIZE
    read_size: int = PART_SIZE
    local: bool = False
    listable: bool = True
    whole: bool = True

    def with_part_size(self, part_size: int | None) -> Capabilities:
        """The same with another part size; None changes nothing."""
        return self if part_size is None else replace(self, part_size=part_size)


class ObjectStore(Protocol):
    """Objects by name. All methods raise `StorageError`; each is bounded in time by its backend.

    - `create` makes the object only if no object has the name, atomically against every other creator, and raises
      `AlreadyExists` otherwise. When it returns the object is durable and whole.
    - `put` writes the object, replacing what was there; a reader sees the old or the new bytes, never a mixture.
    - Both send one request, so they are for objects of at most 64 MiB; larger ones are uploads. An upload replaces as
      `put` does: whoever must not meet another's bytes gives each attempt a name of its own, and creates a record that
      says which name counts.
    - `get` returns bytes `[start, end)`, the whole object by default, and raises `NotFound`.
    - `size` is the object's length in bytes, or None if there is none.
    - `list` gives the objects below a folder (`""` or a name that ends in `/`), sorted by name. It may be stale.
    - `delete` removes the object; a missing one is no error.

    A backend inherits from this class and overrides the defaults below where the store can do better.
    """

    @property
    def url(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def create(self, name: str, data: Data) -> None: ...

    def put(self, name: str, data: Data) -> None: ...

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes: ...

    def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
        """Fill all of the buffers, one after the other, with the object's bytes from `start`. Raises `NotFound`, and
        `Truncated` if the object ends before; what the buffers then hold is undefined."""
        views, wanted = views_of(buffers)
        data = self.get(name, start, start + wanted)
        if len(data) != wanted:
            raise truncated(self.url, name, start, wanted, len(data))
        scatter(memoryview(data), views)

    def size(self, name: str) -> int | None: ...

    def list(self, folder: str = "") -> list[ObjectInfo]: ...

    def delete(self, name: str) -> None: ...

    def start_upload(self, name: str, size_hint: int | None = None) -> Upload:
        """An upload for callers that write parts themselves, from several threads; others use `open_write`.

        `size_hint` is the object's size if it is known: large objects get larger parts. May do I/O.
        """
        return SpooledUpload(self, check_name(name), part_size_for(self.capabilities.part_size, size_hint))

    def open_write(self, name: str, size_hint: int | None = None) -> ObjectWriter:
        """A writer whose `commit` has the meaning of `put`. It holds at most one part in memory."""
        return ObjectWriter(self, check_name(name), self.capabilities.part_size, size_hint)

    def sweep_uploads(self, older_than: float, dead: Callable[[str], bool] = lambda name: False) -> int:
        """Remove what uploads left behind that were started more than `older_than` seconds ago; how many there were.

        Another process may still be writing a younger one. Of an object whose name is `dead`, it goes at any age: the
        caller knows that nobody may finish it. Stores without leftovers return 0.
        """
        return 0


def views_of(buffers: Iterable[memoryview]) -> tuple[list[memoryview], int]:
    """The bytes of the buffers, and how many they are together."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    return views, sum(len(view) for view in views)


def scatter(data: memoryview, views: Iterable[memoryview], at: int = 0) -> None:
    """Put `data` where the views, taken as one run of bytes, have byte `at`."""
    for view in views:
        if at < len(view):
            count = min(len(data), len(view) - at)
            view[at : at + count] = data[:count]
            data, at = data[count:], 0
            if not data:
                return
        else:
            at -= len(view)


def part_size_for(part_size: int, size_hint: int | None) -> int:
    """Bytes a part such that an object of `size_hint` bytes has at most `MAX_PARTS`, rounded up to whole MiB."""
    least = -(-(size_hint or 0) // MAX_PARTS)
    return part_size if least <= part_size else -(-least // 2**20) * 2**20


def truncated(url: str, name: str, start: int, wanted: int, got: int) -> Truncated:
    """The error of an object that ends before what was asked for."""
    return Truncated(f"{url}: {name} ends after {start + got} bytes; bytes {start} to {start + wanted} were asked for")


def check_name(name: str) -> str:
    """Return the name unchanged, or raise `InvalidName` saying what is wrong with it."""
    if not name or len(name) > MAX_NAME:
        raise InvalidName(f"object name of {len(name)} characters: 1 to {MAX_NAME} are allowed")
    if not name.isascii() or not name.isprintable() or "\\" in name:
        raise InvalidName(f"object name {name!r}: only printable ASCII without backslash is allowed")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise InvalidName(
            f"object name {name!r} has an empty, '.' or '..' component: it could leave the store's prefix"
        )
    return name


def check_folder(folder: str) -> str:
    """Return the folder unchanged, or raise `InvalidName`; a folder is `""` or a name followed by `/`."""
    if folder == "":
        return folder
    if not folder.endswith("/"):
        raise InvalidName(f"folder {folder!r} does not end in '/'")
    check_name(folder[:-1])
    return folder
