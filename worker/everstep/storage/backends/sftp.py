"""Files on an SSH server, over fsspec's client, which is paramiko's.

Invariants: one request at a time on a connection, because paramiko drops an answer that another thread waits for; each
has a time limit; and a client whose connection is lost is dropped, so that the next request makes a new one. Shards
have a connection of their own: a sign of life that waits for one would come too late, and its run be fenced.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from everstep.contract.forks import ForkLock
from everstep.storage.backends.fsspec_store import Options
from everstep.storage.backends.generic import GenericStore
from everstep.storage.errors import NotFound, StorageError, StoreUnusable, TerminalError
from everstep.storage.upload import Data

SCHEMES: Final = frozenset({"sftp", "ssh"})
_CONNECT_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 60.0
_LARGE: Final = 2**20  # bytes
_REFUSED: Final = {
    "AuthenticationException", "BadAuthenticationType", "BadHostKeyException", "PasswordRequiredException"
}  # fmt: skip


class SftpStore(GenericStore):
    """Objects below `sftp://user@host:port/folder`. `options` go to fsspec's file system, and from there to paramiko's
    `SSHClient.connect`: `password`, `key_filename`, `host_key_policy`."""

    def __init__(
        self, url: str, options: Options | None = None, part_size: int | None = None, *, for_shards: bool = False
    ) -> None:
        super().__init__(url, options, part_size)
        self._turn = ForkLock()
        self._for_shards = None if for_shards else SftpStore(url, options, part_size, for_shards=True)

    def put(self, name: str, data: Data) -> None:
        if self._for_shards is not None and memoryview(data).nbytes > _LARGE:
            self._for_shards.put(name, data)
        else:
            super().put(name, data)

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        if self._for_shards is not None and end is not None:  # records are read as a whole
            return self._for_shards.get(name, start, end)
        try:
            return super().get(name, start, end)
        except TerminalError as e:
            if isinstance(e, NotFound | StoreUnusable) or self.size(name) is not None:
                raise
            raise NotFound(f"{self.url}: no object {name}") from e  # a folder, which the server only fails to open

    def delete(self, name: str) -> None:
        """Its folder goes when it is empty: a listing asks the server about each one, of all saves there ever were."""
        super().delete(name)
        if "/" in name:
            with self.translated("removing the folder of", name):
                fs, root = self.fs()
                try:
                    fs.ftp.rmdir(f"{root}/{name}".rpartition("/")[0])
                except OSError as e:  # it is not empty, or gone
                    if self._is_lost(e):
                        raise

    def move(self, fs: Any, temporary: str, final: str, mode: str) -> None:
        """OpenSSH's own request replaces a file. The standard one refuses to, so that of two creators one wins."""
        if mode != "create":
            try:
                fs.mv(temporary, final)
                return
            except OSError as e:  # perhaps the server does not know this request
                if self._is_lost(e):
                    raise
        fs.ftp.rename(temporary, final)

    def arguments(self) -> dict[str, Any]:
        limits = {"timeout": _CONNECT_SECONDS, "banner_timeout": _CONNECT_SECONDS, "auth_timeout": _ANSWER_SECONDS}
        arguments = limits | super().arguments()
        # What the file system does not know goes on to paramiko, which does not know these. It caches no listings.
        return {k: v for k, v in arguments.items() if k not in ("use_listings_cache", "asynchronous")}

    def _open(self) -> tuple[Any, str]:
        fs, root = super()._open()
        fs.ftp.get_channel().settimeout(_ANSWER_SECONDS)
        return fs, root

    @contextmanager
    def translated(self, doing: str, name: str) -> Iterator[None]:
        with self._turn, super().translated(doing, name):
            try:
                yield
            except StorageError:
                raise
            except Exception as e:
                kind = type(e).__name__
                if kind in _REFUSED:
                    raise StoreUnusable(
                        f"{self.url}: the SSH server refuses this user, or its key is another one: {e}. Check the user "
                        "in the URL, storage_options (password or key_filename), and the server's known key"
                    ) from e
                if self._is_lost(e):
                    self.forget()
                    raise ConnectionResetError(f"the connection to the SSH server: {e or kind}") from e
                raise

    def _is_lost(self, e: Exception) -> bool:
        """Whether the connection is of no more use. Over one that is, a server's refusal comes as a bare `OSError`."""
        if isinstance(e, EOFError | TimeoutError | socket.gaierror) or type(e).__module__.startswith("paramiko."):
            return True
        made = self._made
        return made is not None and not made[1].ftp.get_channel().get_transport().is_active()
