"""The API server and the credentials that a kubelet gives to a pod: a CA, and a token that it replaces in time.

Invariant: a request is sent with the token that the file has now. If the file cannot be read any more, the last token
is used until the server refuses it; the session then loads everything again, and that error names the file.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from everstep_operator.kube.access import Access
from everstep_operator.kube.errors import CredentialsError

log = logging.getLogger(__name__)

REREAD_EVERY = 60.0  # seconds: a file system may not show that a file has changed
_TOKEN = re.compile(r"[!-~]+")  # what a header can contain


class TokenFile:
    """The token in a file. It is read again when the file has changed, and at the latest each minute."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Raises `CredentialsError`."""
        self._path, self._monotonic, self._is_current = path, monotonic, True
        self._read()

    async def authorization(self) -> str:
        """The value of the header. The last one if the file cannot be read now."""
        try:
            if self._monotonic() - self._read_at >= REREAD_EVERY or _version(self._path) != self._version:
                self._read()
            self._is_current = True
        except (CredentialsError, OSError) as error:
            if self._is_current:  # one line until it can be read again, and not one for each request
                log.warning("the token cannot be read again, so the last one is used: %s", error)
            self._is_current = False
        return f"Bearer {self._token}"

    def _read(self) -> None:
        try:
            version = _version(self._path)  # before the text: a change between the two is then seen next time
            token = self._path.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CredentialsError(f"{self._path}: the token cannot be read: {error}") from error
        if _TOKEN.fullmatch(token) is None:
            raise CredentialsError(f"{self._path}: {'has more than a token' if token else 'is empty'}")
        self._token, self._version, self._read_at = token, version, self._monotonic()


def _version(path: Path) -> tuple[int, int, int]:
    """What differs when the file is another one, or was written."""
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def access(server: str, directory: Path) -> Access:
    """Read the files that the kubelet has mounted there. Raises `CredentialsError`."""
    token, authority = TokenFile(directory / "token"), directory / "ca.crt"
    try:
        tls = ssl.create_default_context(cafile=authority)
    except ssl.SSLError as error:
        raise CredentialsError(f"{authority}: has no certificate in PEM: {error}") from error
    except OSError as error:
        raise CredentialsError(f"{authority}: the CA of the API server cannot be read: {error}") from error
    return Access(server, str(authority), tls, token.authorization)
