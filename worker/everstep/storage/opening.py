"""From a URL to a store: which backend serves which scheme, and which schemes are refused.

Only backends whose conditional create is real are opened by default. fsspec's generic `mode="create"` looks first and
writes then, so a probe would pass and two writers could still both commit: such schemes need `single_committer`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from everstep.storage.base import ObjectStore
from everstep.storage.errors import StoreUnusable
from everstep.storage.local import LocalStore
from everstep.storage.memory import MemoryStore

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_store(url: str, options: Mapping[str, Any] | None = None, *, single_committer: bool = False) -> ObjectStore:
    """The store below `url`: a path, `file://` (%-encoded), `memory://NAME` (this process only) or any fsspec URL.

    Opening does no I/O. Raises `StoreUnusable` for an empty URL or a scheme that cannot be used.
    """
    if not url:
        raise StoreUnusable("no checkpoint URL: pass url=… or set EVERSTEP_CHECKPOINT_URL")
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalStore(url)
    match scheme:
        case "file" | "local":
            if not rest.startswith("/"):
                raise StoreUnusable(f"{url}: a file URL needs an absolute path, as in file:///path")
            return LocalStore(unquote(rest))
        case "memory":
            with _memory_lock:
                return _memory.setdefault(rest, MemoryStore(rest))
        case _:
            return _fsspec(url, scheme, options, single_committer)


def _fsspec(url: str, scheme: str, options: Mapping[str, Any] | None, single_committer: bool) -> ObjectStore:
    try:
        from fsspec.registry import known_implementations, registry  # noqa: PLC0415  only remote URLs pay for fsspec's import

        from everstep.storage.fsspec_store import CONDITIONAL, FsspecStore  # noqa: PLC0415
    except ImportError as e:
        raise StoreUnusable(f"{url}: fsspec is missing; install everstep[worker]") from e
    if scheme not in known_implementations and scheme not in registry:
        raise StoreUnusable(f"{url}: unknown scheme {scheme!r}. Known: file, s3, gs, az and every other fsspec scheme")
    if scheme not in CONDITIONAL and not single_committer:
        raise StoreUnusable(
            f"{url}: {scheme}:// has no conditional create, so two writers could both commit. Use one of "
            f"{', '.join(sorted(CONDITIONAL | {'file'}))}, or single_committer=True if only one job ever writes there"
        )
    return FsspecStore(url, options)
