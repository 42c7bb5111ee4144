"""Files on an SSH server, over fsspec's client, which is paramiko's.

Invariants: one request at a time, because paramiko drops an answer that another thread waits for; each has a time
limit; and a client whose connection is lost is dropped, so that the next request makes a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from everstep.storage.backends.fsspec_store import Options
from everstep.storage.backends.generic import GenericStore
from everstep.storage.errors import NotFound, StorageError, StoreUnusable, TerminalError
from everstep.storage.locks import ForkLock

SCHEMES: Final = frozenset({"sftp", "ssh"})
_CONNECT_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 60.0
_REFUSED: Final = {
    "AuthenticationException", "BadAuthenticationType", "BadHostKeyException", "PasswordRequiredException"
}  # fmt: skip


class SftpStore(GenericStore):
    """Objects below `sftp://user@host:port/folder`. `options` go to fsspec's file system, and from there to paramiko's
    `SSHClient.connect`: `password`, `key_filename`, `host_key_policy`."""

    def __init__(self, url: str, options: Options | None = None, part_size: int | None = None) -> None:
        super().__init__(url, options, part_size)
        self._turn = ForkLock()

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        try:
            return super().get(name, start, end)
        except TerminalError as e:
            if isinstance(e, NotFound | StoreUnusable) or self.size(name) is not None:
                raise
            raise NotFound(f"{self.url}: no object {name}") from e  # a folder, which the server only fails to open

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
        if isinstance(e, EOFError | TimeoutError) or type(e).__module__.startswith("paramiko."):
            return True
        made = self._made
        return made is not None and not made[1].client.get_transport().is_active()
