"""From a URL to a store: which backend serves which scheme, and which schemes are refused.

Only backends whose conditional create is real are opened by default. fsspec's generic `mode="create"` looks first and
writes then, so a probe would pass and two writers could still both commit: such schemes need `single_committer`.
Imports nothing heavy before a URL asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from everstep.storage.backends.local import LocalStore
from everstep.storage.backends.memory import MemoryStore
from everstep.storage.base import ObjectStore
from everstep.storage.errors import StoreUnusable
from everstep.storage.locks import ForkLock
from everstep.storage.paths import folder, folder_of_url, normal

if TYPE_CHECKING:
    from everstep.storage.backends.fsspec_store import FsspecStore

_memory: dict[str, MemoryStore] = {}
_memory_lock = ForkLock()


def open_store(
    url: str,
    options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    *,
    single_committer: bool = False,
    part_size: int | None = None,
) -> ObjectStore:
    """The store below `url`: a path (`~` is the home folder), `file://` (%-encoded), `memory://NAME` (this process
    only) or any fsspec URL.

    `options` go to the backend (keys, endpoint and the like); a function is called for each new client, so it can give
    fresh credentials. `part_size` is in bytes. Opening does no I/O.

    Raises `StoreUnusable` for an empty URL, a scheme that cannot be used, a missing package, and a text that looks like
    a URL or a variable but is none: `s3:/bucket`, `$HOME/run`.
    """
    if not url:
        raise StoreUnusable("no checkpoint URL: pass url=… or set EVERSTEP_CHECKPOINT_URL")
    url, scheme, rest = normal(url)
    if not scheme and "://" not in url:
        return LocalStore(folder(url), part_size, single_committer=single_committer)
    match scheme:
        case "file" | "local":
            return LocalStore(folder_of_url(url, rest), part_size, single_committer=single_committer)
        case "memory":
            with _memory_lock:
                return _memory.setdefault(rest, MemoryStore(rest, part_size))
        case _:
            return _remote(url, scheme, options, single_committer, part_size)


def _remote(
    url: str,
    scheme: str,
    options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None,
    single_committer: bool,
    part_size: int | None,
) -> FsspecStore:
    from fsspec.registry import known_implementations, registry  # noqa: PLC0415  only remote URLs pay for fsspec's import

    from everstep.storage.backends import azure, gcs, generic, s3, sftp, web  # noqa: PLC0415  as above

    if not url.partition("://")[2].strip("/"):
        raise StoreUnusable(f"{url} names no bucket: {scheme}://BUCKET/FOLDER is expected")
    if scheme in s3.SCHEMES:
        return s3.S3Store(url, options, part_size, whole=not single_committer)
    if scheme in gcs.SCHEMES:
        return gcs.GcsStore(url, options, part_size)
    if scheme in azure.SCHEMES:
        return azure.AzureStore(url, options, part_size)
    if scheme in web.SCHEMES:
        return web.WebStore(url, options, part_size)
    if scheme not in known_implementations and scheme not in registry:
        raise StoreUnusable(f"{url}: unknown scheme {scheme!r}. Known: file, s3, gs, az and every other fsspec scheme")
    if scheme == "ftp":
        # fsspec's client takes a lost connection for a missing file, and mixes up the answers of two threads.
        raise StoreUnusable(f"{url}: a checkpoint is not safe on an FTP server. Use sftp:// or an object store")
    if not single_committer:
        conditional = sorted({"file"} | s3.SCHEMES | gcs.SCHEMES | azure.SCHEMES)
        raise StoreUnusable(
            f"{url}: {scheme}:// has no conditional create, so two writers could both commit. Use one of "
            f"{', '.join(conditional)}, or single_committer=True if only one job ever writes there"
        )
    if scheme in sftp.SCHEMES:
        return sftp.SftpStore(url, options, part_size)
    return generic.GenericStore(url, options, part_size)
