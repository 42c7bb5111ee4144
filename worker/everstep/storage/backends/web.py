"""Objects that a web server hands out, read only, with requests of its own on fsspec's HTTP session.

fsspec's `info` and `find` turn a refused connection into a missing file, and a log whose end "is missing" gives an
older commit. Invariant: only a server's own 404 or 410 means that an object is missing.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from everstep.storage.backends.fsspec_store import FsspecStore, Options
from everstep.storage.base import Capabilities, ObjectInfo, check_folder, check_name
from everstep.storage.errors import NotFound, StoreUnusable, Truncated

T = TypeVar("T")

SCHEMES: Final = frozenset({"http", "https"})
_MISSING: Final = (404, 410)
_NO_HEAD: Final = (400, 401, 403, 405, 501)  # what servers answer that do not let a HEAD through, though a GET
_PLAIN: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")


class WebStore(FsspecStore):
    """Objects below `http://` or `https://`. `options` go to fsspec's `HTTPFileSystem`: `headers`, `params`, `ssl`.

    Raises `StoreUnusable` for a URL with a query or a fragment: the names of objects would follow behind it, and each
    would seem to be missing.
    """

    offers = Capabilities(multipart=False, writable=False, listable=False)

    def __init__(self, url: str, options: Options | None = None, part_size: int | None = None) -> None:
        for sign, kind, instead in (
            ("?", "a query", "storage_options={'params': {…}} sends one with each request"),
            ("#", "a fragment", "leave it out"),
        ):
            if sign in url:
                code = f"%{ord(sign):02X}"
                raise StoreUnusable(
                    f"{url} has {kind}, behind which no file can be named: {instead}. In a folder's name write {code}"
                )
        super().__init__(url, options, part_size)

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        check_name(name)
        first = start or 0
        if end is not None and first >= end:
            return b""

        async def read(fs: Any) -> bytes:
            wanted = {"Range": f"bytes={first}-{'' if end is None else end - 1}"} if first or end is not None else {}
            async with await _ask(fs, "get", f"{root}/{name}", wanted) as answer:
                _check(answer)
                data = bytes(await answer.read())
                # A server without ranges sends all.
                return data if answer.status == 206 else data[first:end]

        root = self._url
        try:
            return self.run("reading", name, read)
        except Truncated:
            return b""

    def size(self, name: str) -> int | None:
        check_name(name)

        async def look(fs: Any) -> int:
            url = f"{self._url}/{name}"
            async with await _ask(fs, "head", url) as answer:
                if answer.status not in _NO_HEAD:
                    _check(answer)
                    if (length := _length(answer)) is not None:
                        return length
            async with await _ask(fs, "get", url) as answer:
                _check(answer)
                if (length := _length(answer)) is not None:
                    return length
                return sum([len(data) async for data in answer.content.iter_any()])

        try:
            return self.run("looking at", name, look)
        except NotFound:
            return None

    def list(self, folder: str = "") -> list[ObjectInfo]:
        """The links of the folder's page, if the server makes one: see `Capabilities.listable`."""
        check_folder(folder)

        def refuse(e: Exception) -> None:
            if not isinstance(e, FileNotFoundError):
                raise e

        with self.translated("listing", folder):
            fs, root = self.fs()
            files = fs.find(f"{root}/{folder}".rstrip("/"), detail=True, on_error=refuse)
        listed = ((url.removeprefix(f"{root}/"), info) for url, info in files.items())
        return sorted(
            ObjectInfo(name, int(info["size"] or 0)) for name, info in listed if info and name.startswith(folder)
        )

    @contextmanager
    def translated(self, doing: str, name: str) -> Iterator[None]:
        with super().translated(doing, name):
            try:
                yield
            except Exception as e:
                if (hopeless := _hopeless(e)) is not None:
                    raise StoreUnusable(f"{self._url}: {doing} {name or '/'}: {e}. {hopeless}") from e
                raise


async def _ask(fs: Any, method: str, url: str, headers: dict[str, str] | None = None) -> Any:
    """One request; what is answered, whose body is not read yet."""
    options = {"allow_redirects": True, **fs.kwargs}
    # Compressed, neither a length nor a range would be one of the object.
    options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity", **(headers or {})}
    session = await fs.set_session()
    return await getattr(session, method)(fs.encode_url(url), **options)


def _check(answer: Any) -> None:
    if answer.status in _MISSING:
        raise FileNotFoundError(str(answer.url))
    answer.raise_for_status()


def _length(answer: Any) -> int | None:
    """The bytes of the object, if the server says so."""
    if answer.headers.get("Content-Encoding", "identity") not in ("identity", ""):
        return None
    text = answer.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None


def _hopeless(e: Exception) -> str | None:
    """The remedy for a lasting error: a wrong scheme, a certificate, an invalid URL. None for other errors."""
    import aiohttp  # noqa: PLC0415  an extra

    if isinstance(e, aiohttp.ClientConnectorCertificateError):
        return "The server's certificate is not trusted: set SSL_CERT_FILE to its authority's, or correct the host"
    reason = getattr(getattr(e, "os_error", None), "reason", None) or getattr(e, "reason", None)
    if isinstance(e, ssl.SSLError | aiohttp.ClientConnectorSSLError) and str(reason) in _PLAIN:
        return "This server does not speak TLS: write http:// for https://, or correct the port"
    if isinstance(e, ValueError):
        return "No request can be made to this URL: check its host and port"
    return None
