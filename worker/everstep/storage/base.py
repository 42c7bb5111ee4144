"""The narrow object-store protocol that everything else is written against.

Names are relative, `/`-separated and never leave the store's prefix: `check_name` is the one gate, and every backend
passes each name through it, whoever wrote the name (a manifest read from the store included).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from everstep.storage.errors import InvalidName

Data = bytes | bytearray | memoryview

MAX_NAME = 512


@dataclass(frozen=True, slots=True, order=True)
class ObjectInfo:
    """One listed object: its name relative to the store and its size in bytes."""

    name: str
    size: int


class ObjectStore(Protocol):
    """Objects by name. All methods raise `StorageError`; each is bounded in time by its backend.

    - `create` makes the object only if no object has the name, atomically against every other creator, and raises
      `AlreadyExists` otherwise. When it returns the object is durable and whole.
    - `put` writes the object, replacing what was there; a reader sees the old or the new bytes, never a mixture.
    - `get` returns bytes `[start, end)`, the whole object by default, and raises `NotFound`.
    - `size` is the object's length in bytes, or None if there is none.
    - `list` gives the objects below a folder (`""` or a name that ends in `/`), sorted by name. It may be stale.
    - `delete` removes the object; a missing one is no error.
    """

    @property
    def url(self) -> str: ...

    def create(self, name: str, data: Data) -> None: ...

    def put(self, name: str, data: Data) -> None: ...

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes: ...

    def size(self, name: str) -> int | None: ...

    def list(self, folder: str = "") -> list[ObjectInfo]: ...

    def delete(self, name: str) -> None: ...


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
