"""One bounded HTTP POST that follows the operator's redirect to its leader.

`urllib.request` refuses to repeat a POST after a 307, hence `http.client`. Knows nothing of what it sends. Every
wait has a bound, and the token leaves only over the configured scheme: a redirect from https to http is refused.
"""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import SplitResult, urljoin, urlsplit

TIMEOUT = 2.0  # seconds, of connecting and of each read
MAX_REDIRECTS = 3
MAX_REASON = 300


class PostError(Exception):
    """The message did not arrive; repeating it later may help."""


class Refused(PostError):
    """The server understood and said no; repeating the same message cannot help."""


def post(url: str, token: str | None, body: bytes) -> None:
    """Deliver `body` as JSON. Raises Refused for 4xx, PostError for everything else that is not a success."""
    target = _parse(url)
    for _ in range(MAX_REDIRECTS + 1):
        status, location, reason = _once(target, token, body)
        if 200 <= status < 300:
            return
        if status in (307, 308) and location:
            onward = _parse(urljoin(target.geturl(), location))
            if onward.scheme != target.scheme:
                raise Refused(f"{target.geturl()} redirects from {target.scheme} to {onward.scheme}")
            target = onward
            continue
        text = f"{target.geturl()} answered {status}: {reason}"
        # 401 and 403 stay retryable for a while on the server's side (a pod that its informer has not seen yet).
        if 400 <= status < 500 and status not in (401, 403, 408, 425, 429):
            raise Refused(text)
        raise PostError(text)
    raise PostError(f"{url} redirects more than {MAX_REDIRECTS} times: the operator has no settled leader")


def _parse(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refused(f"{url!r} is not an http or https URL")
    return parts


def _once(target: SplitResult, token: str | None, body: bytes) -> tuple[int, str | None, str]:
    assert target.hostname is not None
    connection: http.client.HTTPConnection
    if target.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(target.hostname, target.port, timeout=TIMEOUT, context=context)
    else:
        connection = http.client.HTTPConnection(target.hostname, target.port, timeout=TIMEOUT)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    path = (target.path or "/") + (f"?{target.query}" if target.query else "")
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        reason = response.read(MAX_REASON).decode(errors="replace").strip() or response.reason
        return response.status, response.getheader("Location"), reason
    except http.client.HTTPException as e:
        raise PostError(f"{target.geturl()} broke off: {type(e).__name__} {e}") from e
    finally:
        connection.close()
