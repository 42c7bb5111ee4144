"""An SSH server on loopback whose only service is SFTP, for the files of this machine. Any user, one password."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import paramiko

PASSWORD = "right"


class _Login(paramiko.ServerInterface):  # type: ignore[misc]  # paramiko has no types
    def check_auth_password(self, username: str, password: str) -> int:
        return int(paramiko.AUTH_SUCCESSFUL if password == PASSWORD else paramiko.AUTH_FAILED)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.OPEN_SUCCEEDED)

    def get_allowed_auths(self, username: str) -> str:
        return "password"


def _answered(request: Callable[..., Any]) -> Callable[..., Any]:
    def answer(*arguments: Any) -> Any:
        try:
            found = request(*arguments)
        except OSError as e:
            return paramiko.SFTPServer.convert_errno(e.errno or 0)
        return paramiko.SFTP_OK if found is None else found

    return answer


class Files(paramiko.SFTPServerInterface):  # type: ignore[misc]
    @_answered
    def list_folder(self, path: str) -> Any:
        found = []
        for entry in os.scandir(path):
            found.append(paramiko.SFTPAttributes.from_stat(entry.stat(), entry.name))
        return found

    @_answered
    def stat(self, path: str) -> Any:
        return paramiko.SFTPAttributes.from_stat(os.stat(path))

    @_answered
    def open(self, path: str, flags: int, attr: Any) -> Any:
        file = os.fdopen(os.open(path, flags, 0o666), "wb" if flags & os.O_WRONLY else "rb")
        handle = paramiko.SFTPHandle(flags)
        handle.readfile = handle.writefile = file
        handle.stat = lambda: paramiko.SFTPAttributes.from_stat(os.fstat(file.fileno()))
        return handle

    @_answered
    def remove(self, path: str) -> None:
        os.remove(path)

    @_answered
    def posix_rename(self, oldpath: str, newpath: str) -> None:
        os.replace(oldpath, newpath)

    @_answered
    def rename(self, oldpath: str, newpath: str) -> None:
        os.link(oldpath, newpath)  # as OpenSSH, which refuses a name that is taken
        os.remove(oldpath)

    @_answered
    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    @_answered
    def mkdir(self, path: str, attr: Any) -> None:
        os.mkdir(path)


class SftpServer:
    """`port`, and how many `logins` there were."""

    def __init__(self) -> None:
        self._key = paramiko.ECDSAKey.generate()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._transports: list[paramiko.Transport] = []
        self.port: int = self._socket.getsockname()[1]
        self.logins = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                self.logins += 1
                transport = paramiko.Transport(connection)
                transport.add_server_key(self._key)
                transport.set_subsystem_handler("sftp", paramiko.SFTPServer, Files)
                self._transports.append(transport)
                transport.start_server(event=threading.Event(), server=_Login())

    def drop(self) -> None:
        """End all connections, as a server does that is started again."""
        while self._transports:
            self._transports.pop().close()

    def close(self) -> None:
        self._socket.close()
        self.drop()


@contextmanager
def sftp_server() -> Iterator[SftpServer]:
    server = SftpServer()
    try:
        yield server
    finally:
        server.close()
