"""A digest of what a pickle says: of any objects, without making one of them, because a class may run code.

In place of each object stands one that only keeps what the pickle gives it. Invariants: no code of the pickle runs; two
pickles of equal contents have the same digest, in whatever order dictionaries and sets were filled, and whether or not
two equal texts in them are one object.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class _Kept:
    """In place of an object: the arguments by which it is made, its state, its elements and its entries."""

    name = ""

    def __new__(cls, *arguments: Any, **named: Any) -> _Kept:
        made = super().__new__(cls)
        made.parts = [(arguments, named)]
        made.entries = {}
        return made

    parts: list[Any]
    entries: dict[Any, Any]

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def append(self, element: Any) -> None:
        self.parts.append(element)

    add = append

    def extend(self, elements: list[Any]) -> None:
        self.parts.extend(elements)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value


class _Reader(pickle.Unpickler):
    """`stored`: the bytes of the storages that `torch.save` has written beside the pickle, by name."""

    def __init__(self, file: io.BytesIO, stored: Callable[[str], bytes]) -> None:
        super().__init__(file)
        self._stored = stored

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type("_Kept", (_Kept,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, *size = pid
        return kind, _short(self._stored(str(key))), size


def digest_of(content: bytes) -> str:
    """Of a file of pickles one behind the other, or of one that `torch.save` has written; "" for another kind."""
    try:
        if content.startswith(b"\x80"):
            return _of_several(content)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            pickled = next(name for name in names if name.endswith("/data.pkl"))
            folder = pickled.removesuffix(".pkl")
            return _Digests().of(
                _Reader(io.BytesIO(archive.read(pickled)), lambda key: archive.read(f"{folder}/{key}")).load()
            )
    except Exception:  # bytes that only begin like such a file may raise anything
        return ""


def _of_several(content: bytes) -> str:
    file, digests = io.BytesIO(content), _Digests()
    found = [digests.of(_Reader(file, lambda _: b"").load())]
    while (behind := file.tell()) < len(content):
        try:
            found.append(digests.of(_Reader(file, lambda _: b"").load()))
        except Exception:  # what follows is no pickle, such as the storages of an old `torch.save`
            found.append(_short(content[behind:]))
            break
    return _short(repr(found).encode())


class _Digests:
    """Of values, each object once: it may occur in many others, or in itself."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._kept: list[Any] = []  # an `id` is that of one object as long as it lives

    def of(self, value: Any) -> str:
        if isinstance(value, type):
            return getattr(value, "name", value.__name__)
        if not isinstance(value, list | tuple | dict | set | frozenset | _Kept):
            return _short(f"{type(value).__name__} {value!r}".encode())
        if (known := self._known.get(id(value))) is None:
            self._known[id(value)] = "itself"
            self._kept.append(value)
            known = self._known[id(value)] = _short(f"{type(value).__name__} {self._parts(value)}".encode())
        return known

    def _parts(self, value: Any) -> list[Any]:
        if isinstance(value, _Kept):
            return [value.name, *(self.of(part) for part in (value.parts, value.entries))]
        if isinstance(value, dict):
            pairs = [(self.of(key), self.of(entry)) for key, entry in value.items()]
            return pairs if isinstance(value, OrderedDict) else sorted(pairs)
        parts = [self.of(part) for part in value]
        return sorted(parts) if isinstance(value, set | frozenset) else parts


def _short(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
