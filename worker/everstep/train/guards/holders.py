"""Reads what objects of Python's own library hold in which a script may keep state: queues, weak dictionaries, context
variables, memory that processes share, positions in files.

Invariants: nothing is taken out, no lock is acquired, and no code of the script's classes is called. An object of a
class that cannot be read so has no parts.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import contextvars
import csv
import ctypes
import functools
import gc
import io
import queue
import threading
import types
import weakref
import zipfile
from collections.abc import Callable
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np

_NUMBERS = frozenset("?bBhHiIlLqQfdgu")  # kinds of ctypes' values that are no addresses


def parts_of_holder(value: Any) -> dict[str, Any] | None:
    """What such an object holds, by what the script would write behind its name; None for another object, and for one
    that is closed or released."""
    read = reader_of(type(value))
    try:
        return None if read is None else read(value)
    except (ValueError, AttributeError, LookupError, OSError):
        return None


def first_of(kind: type) -> type:
    """The class from which it is derived first."""
    return kind.__mro__[-2] if len(kind.__mro__) > 1 else kind


def reader_of(kind: type) -> _Read | None:
    if first_of(kind) is threading.local and kind is not threading.local:
        return None  # its `__init__` is called where a thread reads it first
    for base in kind.__mro__:
        if (read := _READ.get(base)) is not None:
            return read
    return None


def _own(value: Any, name: str) -> Any:
    return object.__getattribute__(value, "__dict__")[name]


def _of_ctypes(value: Any) -> dict[str, Any] | None:
    """A number, or the memory of an array or a structure. What is an address is not read."""
    if not isinstance(value, _SIMPLE):
        return {"[:]" if isinstance(value, ctypes.Array) else " as bytes": bytes(memoryview(value))}
    kind: Any = type(value)
    return {".value": _SIMPLE.value.__get__(value)} if kind._type_ in _NUMBERS else None


def _of_simple_queue(value: Any) -> dict[str, Any]:
    """Its list has what was taken out, for a while, at the beginning."""
    elements, size = gc.get_referents(value)[0], value.qsize()
    return {".queue": elements[len(elements) - size :]}


def _of_weak_keys(value: Any) -> dict[str, Any]:
    """Its keys have no names: each value has the place of its key."""
    alive = [value for key, value in list(_own(value, "data").items()) if key() is not None]
    return {".data": len(alive), **{f".data[{i}]": value for i, value in enumerate(alive)}}


def _of_weak_values(value: Any) -> dict[str, Any]:
    alive = [(key, value) for key, ref in list(_own(value, "data").items()) if (value := ref()) is not None]
    return {".data": len(alive), **{f"[{key!r}]": value for key, value in alive if type(key) in (str, int)}}


def _of_cache(value: Any) -> dict[str, Any]:
    """Not what it keeps: that says when its process began."""
    own = object.__getattribute__(value, "__dict__").items()
    return {f".{key}": part for key, part in own if key == "__wrapped__" or not key.startswith("__")}


def _of_file(value: Any) -> dict[str, Any] | None:
    """The position in a file that is read. In one that is written it says nothing."""
    raw = value.buffer if isinstance(value, io.TextIOWrapper) else value
    if not isinstance(raw, io.BufferedReader | io.BufferedRandom | io.FileIO) or not raw.seekable():
        return None
    if isinstance(raw, io.FileIO) and not raw.readable():
        return None
    parts = {(".buffer.tell()" if raw is not value else ".tell()"): type(raw).tell(raw)}
    if isinstance(value, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # within `for line in file`, where only whole blocks are counted
            parts[".tell()"] = io.TextIOWrapper.tell(value)
    return parts


_SIMPLE: Any = ctypes.c_int.__base__  # of which all numbers are
_Read = Callable[[Any], dict[str, Any] | None]
_READ: dict[type, _Read] = {
    threading.local: lambda value: {f".{k}": v for k, v in threading.local.__getattribute__(value, "__dict__").items()},
    contextvars.ContextVar: lambda value: {".get()": value.get()},
    contextvars.Context: lambda value: {f"[{var.name!r}]": part for var, part in value.items()},
    memoryview: lambda value: {".tobytes()": value.tobytes()},
    types.CellType: lambda value: {".cell_contents": value.cell_contents},
    functools._lru_cache_wrapper: _of_cache,
    np.random.SeedSequence: lambda value: {".n_children_spawned": value.n_children_spawned, ".entropy": value.entropy},
    queue.SimpleQueue: _of_simple_queue,
    queue.Queue: lambda value: {".queue": _own(value, "queue")},
    asyncio.Queue: lambda value: {"._queue": _own(value, "_queue")},
    weakref.ref: lambda value: {"()": weakref.ref.__call__(value)},
    type(csv.reader([])): lambda value: {".line_num": value.line_num},
    threading.Event: lambda value: {".is_set()": _own(value, "_flag")},
    zipfile.ZipExtFile: lambda value: {".tell()": zipfile.ZipExtFile.tell(value)},
    codecs.StreamReaderWriter: lambda value: {".stream": _own(value, "stream")},
    np.nditer: lambda value: {".iterindex": value.iterindex},
    csv.DictReader: lambda value: {".reader": _own(value, "reader")},
    np.flatiter: lambda value: {".index": value.index},
    io.TextIOWrapper: _of_file, io.BufferedReader: _of_file, io.BufferedRandom: _of_file, io.FileIO: _of_file,
    weakref.WeakKeyDictionary: _of_weak_keys,
    weakref.WeakValueDictionary: _of_weak_values,
    weakref.WeakSet: lambda value: {".data": sum(ref() is not None for ref in list(_own(value, "data")))},
    io.StringIO: lambda value: {".getvalue()": io.StringIO.getvalue(value), ".tell()": io.StringIO.tell(value)},
    io.BytesIO: lambda value: {".getvalue()": io.BytesIO.getvalue(value), ".tell()": io.BytesIO.tell(value)},
    SynchronizedBase: lambda value: _of_ctypes(_own(value, "_obj")),  # its own methods wait for its lock
    _SIMPLE: _of_ctypes, ctypes.Array: _of_ctypes, ctypes.Structure: _of_ctypes, ctypes.Union: _of_ctypes,
}  # fmt: skip
