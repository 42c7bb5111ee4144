"""A server that answers in the operator's place, always with the same bytes, and what such servers say."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import Counter

from everstep.contract.document import Document, Sizes, encode
from everstep.contract.rounds import EXPIRATIONS_HEADER, VERSION_HEADER
from support.rendezvous.agents import LIMIT

DOCUMENT = encode(Document(Sizes(1, 1)))
HTML = b"<html><body>It works!</body></html>"
STATUS = json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden"}).encode()


def answer(status: int, body: bytes = b"", *, kind: str = "text/html", headers: str = "", cut: int = 0) -> bytes:
    """A response; the last `cut` bytes of it are never sent."""
    lines = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    lines += f"Connection: close\r\n{headers}\r\n"
    return (lines.encode() + body)[: -cut or None]


SEEN = f"{VERSION_HEADER}: 7\r\n{EXPIRATIONS_HEADER}: 0\r\n"
STRANGERS = {
    "404 of a server that knows no such path": answer(404, b"404: Not Found", kind="text/plain"),
    "404 of an API server": answer(404, STATUS, kind="application/json"),
    "403 of an API server": answer(403, STATUS, kind="application/json"),
    "403 of a firewall": answer(403, HTML),
    "401 of a proxy": answer(401, HTML, headers="WWW-Authenticate: Basic\r\n"),
    "400 of a server that wants TLS": answer(400, b"Client sent an HTTP request to an HTTPS server."),
    "405": answer(405),
    "421": answer(421),
    "451": answer(451, HTML),
    "redirect to a login page": answer(302, headers="Location: http://127.0.0.1:9/login\r\n"),
    "redirect to another scheme": answer(307, headers="Location: https://127.0.0.1:9/v1\r\n"),
    "redirect to nowhere": answer(307),
    "500 of a proxy": answer(500, HTML),
    "502 of a proxy": answer(502, HTML),
    "503 without a word": answer(503),
    "200 with a page": answer(200, HTML),
    "200 with other JSON": answer(200, b'{"status": "ok"}', kind="application/json"),
    "201": answer(201, b"{}", kind="application/json"),
    "204 of another server": answer(204),
    "document that is cut off": answer(
        200,
        DOCUMENT,
        kind="application/json",
        headers=SEEN,
        cut=len(DOCUMENT) // 2,
    ),
    "body that is much too long": answer(200, b"x" * 2_000_000),
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "nothing": b"",
}


class Stranger:
    """Answers each request with the same bytes and closes, until it is told where the operator is."""

    def __init__(self, says: bytes) -> None:
        self.says, self.asked = says, 0
        self.tokens: Counter[str] = Counter()  # requests with each, in lower case
        self.operator = ""  # sent there, from then on
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LIMIT)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                guest, _ = self._listener.accept()
                with guest, contextlib.suppress(OSError):
                    guest.settimeout(LIMIT)
                    self._answer(guest)

    def _answer(self, guest: socket.socket) -> None:
        with guest.makefile("rb") as file:
            path = file.readline().split(b" ")[1].decode()
            headers = dict(line.lower().strip().split(b": ", 1) for line in iter(file.readline, b"\r\n"))
            file.read(int(headers.get(b"content-length", b"0")))
        self.asked += 1
        self.tokens[headers.get(b"authorization", b"").removeprefix(b"bearer ").decode()] += 1
        location = f"Location: {self.operator}{path}\r\n"
        guest.sendall(answer(307, headers=location) if self.operator else self.says)
