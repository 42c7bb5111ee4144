"""Bytes to and from presigned S3 URLs, straight between the caller's memory and the socket.

s3fs sends through an event loop, and hashes and copies each body on the way: measured over plain HTTP, 12 times the CPU
seconds of this. It still resolves the credentials and signs the URL; TLS protects the bytes on the wire, and what is
read back is checked above this package. botocore's HTTP session brings proxies, certificates and time limits.
Invariant: connections belong to the process that made the `Wire`.
"""

from __future__ import annotations

import http.client
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from everstep.storage.upload import Data
from everstep.torch_private.libraries import innermost

CONNECTIONS: Final = 16
_ERROR_BYTES: Final = 64 * 2**10
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")


class WireError(Exception):
    """An answer that is not a success, in the shape of botocore's `ClientError.response`."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        code = _CODE.search(body)
        self.response = {
            "Error": {"Code": code[1].decode() if code else ""},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {k.lower(): v for k, v in headers.items()}},
        }
        super().__init__(f"HTTP {status}: {body[:200].decode(errors='replace')}")


class Wire:
    """Pooled connections; safe for many threads."""

    def __init__(self, connect_seconds: float, read_seconds: float, endpoint: str) -> None:
        from botocore.httpsession import URLLib3Session  # noqa: PLC0415  only S3 pays for the import
        from botocore.utils import get_environ_proxies  # noqa: PLC0415

        self._session: Any = URLLib3Session(
            verify=os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE") or True,
            proxies=get_environ_proxies(endpoint),
            timeout=(connect_seconds, read_seconds),
            max_pool_connections=CONNECTIONS,
        )

    def put(self, url: str, data: Data, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Send `data`; the headers of the answer. Raises `WireError` and botocore's connection errors."""
        view = memoryview(data).cast("B")
        answer = self._send("PUT", url, {"Content-Length": str(len(view)), **headers}, view)
        _body(answer)  # so that the connection can be used again
        found: Mapping[str, str] = answer.headers
        return found

    def get(self, url: str, start: int, views: Sequence[memoryview]) -> int:
        """Fill the views, one after the other, with the bytes from `start`; how many there were. Raises as `put`, and
        `ConnectionError` if the answer breaks off."""
        wanted = sum(len(view) for view in views)
        answer = self._send("GET", url, {"Range": f"bytes={start}-{start + wanted - 1}"}, None)
        if answer.status_code != 206 and start:
            answer.raw.close()
            raise WireError(501, {}, b"the server ignores ranges")
        length = int(answer.headers.get("Content-Length", -1))
        try:
            done = _into(answer.raw, views)
        except (http.client.HTTPException, OSError) as e:
            answer.raw.close()
            raise ConnectionError(f"the answer broke off: {e!r}") from e
        if done == length:
            answer.raw.release_conn()  # the next request goes over it
            return done
        answer.raw.close()
        if done < min(wanted, length):
            raise ConnectionError(f"the answer broke off after {done} of {length} bytes")
        return done

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: memoryview | None) -> Any:
        from botocore.awsrequest import AWSPreparedRequest  # noqa: PLC0415

        answer = self._session.send(AWSPreparedRequest(method, url, dict(headers), body, stream_output=True))
        if answer.status_code >= 300:
            raise WireError(answer.status_code, answer.headers, _body(answer))
        return answer


def _into(raw: Any, views: Sequence[memoryview]) -> int:
    """Read a body into the views; how many bytes there were."""
    source, done = innermost(raw), 0
    for view in views:
        at = 0
        while at < len(view):
            count = source.readinto(view[at:])
            if not count:
                return done + at
            at += count
        done += at
    return done


def _body(answer: Any) -> bytes:
    data = bytes(answer.raw.read(_ERROR_BYTES))
    answer.raw.drain_conn()
    return data
