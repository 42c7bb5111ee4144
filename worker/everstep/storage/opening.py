"""From a URL to a store: which backend serves which scheme, and which schemes are refused.

Only backends whose conditional create is real are opened by default. fsspec's generic `mode="create"` looks first and
writes then, so a probe would pass and two writers could still both commit: such schemes need `single_committer`.
Imports nothing heavy before a URL asks for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from everstep.contract.forks import ForkLock
from everstep.storage.backends.local import LocalStore
from everstep.storage.backends.memory import MemoryStore
from everstep.storage.base import ObjectStore
from everstep.storage.errors import StoreUnusable
from everstep.storage.retry import RetryingStore, RetryPolicy

# --- paths
# Which folder a path means, and which texts are no path: a URL with a slash too few must not make a folder `s3:`.
# Invariant: a text that is refused here says in its error what to write instead, and every folder can be written
# somehow.

# `s3:/bucket`, `gs:bucket`: what stands before the first slash looks like a scheme. RFC 3986 says how schemes look.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/*)(.*)", re.DOTALL)
# `10.0.0.5:9000`, `[::1]:9000`: no scheme begins so, and a folder `2026-01-01T10:00` does not either.
_ADDRESS = re.compile(r"(\d{1,3}(?:\.\d{1,3}){3}|\[[0-9A-Fa-f:.]+\]):\d+(/.*)?", re.DOTALL)
_PORT = re.compile(r"\d+(/|$)")
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


def folder(path: str) -> str:
    """The folder that `path`, which has no `://`, means: `~` is the home folder. Raises `StoreUnusable`."""
    if path != path.strip():
        raise StoreUnusable(f"{path!r} begins or ends with a blank or a line break: take it away")
    _check_variables(path)
    if path.startswith("~"):
        expanded = os.path.expanduser(path)
        if expanded.startswith("~"):
            name = path.partition("/")[0]
            raise StoreUnusable(f"{path}: {name} is no user with a home folder; a folder of that name is ./{path}")
        return expanded
    if _ADDRESS.fullmatch(path):
        raise StoreUnusable(f"{path}: {_of_host(path)}; a folder of that name is ./{path}")
    if (scheme := _SCHEME.match(path)) and "/" not in scheme[1]:
        raise StoreUnusable(f"{path}: {_instead(scheme[1], scheme[3])}; a folder of that name is ./{path}")
    return path


def folder_of_url(url: str, rest: str) -> str:
    """The folder of a `file://` URL, of which `rest` is what follows that, %-encoded. Raises `StoreUnusable`."""
    host, slash, _ = rest.partition("/")
    if host.lower() == "localhost" and slash:  # RFC 8089: the same as none
        rest = rest[len(host) :]
    if not rest.startswith("/"):
        raise StoreUnusable(f"{url}: a file URL needs an absolute path, as in file:///path")
    _check_variables(url)
    return unquote(rest)


def _check_variables(path: str) -> None:
    if (variable := _VARIABLE.search(path)) is not None:
        name = variable[0]
        raise StoreUnusable(
            f"{path}: {name} is an environment variable, and nothing replaces it here: give the path itself. A folder "
            f"of that name is %24{name[1:]} in a file:// URL"
        )


def _instead(scheme: str, rest: str) -> str:
    match scheme.lower():
        case "file" | "local":
            return f"a file URL has three slashes: file:///{rest}"
        case "dbfs":
            return f"a folder of Databricks is mounted at /dbfs: /dbfs/{rest}"
        case _ if _PORT.match(rest):
            return _of_host(f"{scheme}:{rest}")
        case known:
            return f"two slashes follow the scheme of a URL: {known}://{rest}"


def _of_host(text: str) -> str:
    return (
        f"this looks like a host with a port, and says no scheme: http://{text} for a web server; for an S3 server "
        "s3://BUCKET/FOLDER, with the server as AWS_ENDPOINT_URL"
    )


def normal(url: str) -> tuple[str, str, str]:
    """A URL, its scheme in lower case (RFC 3986: schemes have no case), and what follows `://`; the text itself and two
    empty ones if it has no `://`. Raises `StoreUnusable` for blanks around it."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url, "", ""
    if url != url.strip():
        raise StoreUnusable(f"{url!r} begins or ends with a blank or a line break: take it away")
    scheme = scheme.lower()
    return f"{scheme}://{rest}", scheme, rest


# --- opening

if TYPE_CHECKING:
    from everstep.storage.backends.fsspec_store import FsspecStore

PATIENCE = 15.0  # seconds
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


def open_for_command(
    url: str, options: Mapping[str, Any] | None = None, *, single_committer: bool = True
) -> ObjectStore:
    """The same for a command that a person waits for: a store may stay away for `PATIENCE` seconds."""
    return RetryingStore(open_store(url, options, single_committer=single_committer), RetryPolicy(outage=PATIENCE))


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
