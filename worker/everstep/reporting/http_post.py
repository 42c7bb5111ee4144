"""Makes one bounded HTTP POST, which follows the operator's redirect to its leader.

It uses `http.client`, because `urllib.request` refuses to repeat a POST after a 307. It does not know what it sends.
Every wait has a bound. The token is sent only to a redirect with the same scheme and path, as with the rendezvous. So a
proxy that answers in the operator's place, and redirects to a page of its own, does not get it. Only the operator's own
answers are final: another server answers in its place only for a while.
"""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import SplitResult, urljoin, urlsplit

from everstep.contract.answers import is_refusal, words

TIMEOUT = 2.0  # seconds, of connecting and of each read
MAX_REDIRECTS = 3
MAX_ANSWER = 16 * 1024


class PostError(Exception):
    """The message did not arrive. To repeat it later may help."""


class Refused(PostError):
    """The server refused the message. To repeat the same message cannot help."""


def post(url: str, token: str | None, body: bytes) -> None:
    """Deliver `body` as JSON. Raises Refused if the operator cannot accept it, and PostError for every other answer
    except its 204."""
    try:
        target = _parse(url)
    except ValueError as e:
        raise Refused(str(e)) from e
    for _ in range(MAX_REDIRECTS + 1):
        status, location, answer = _once(target, token, body)
        if status == 204:
            return
        if status in (307, 308) and location:
            target = _onward(target, location)
            continue
        reason = words(answer) or answer[:300].decode(errors="replace").strip() or "no reason given"
        text = f"{target.geturl()} answered {status}: {reason}"
        # 401 and 403 may pass soon: the token is being replaced, or the operator has not seen the pod yet.
        if is_refusal(status, answer) and status not in (401, 403):
            raise Refused(text)
        raise PostError(text)
    raise PostError(f"{url} redirects more than {MAX_REDIRECTS} times: the operator has no settled leader")


def _onward(target: SplitResult, location: str) -> SplitResult:
    try:
        onward = _parse(urljoin(target.geturl(), location))
    except ValueError as e:
        raise PostError(f"{target.geturl()} redirects to {location[:200]!r}: {e}") from e
    if (onward.scheme, onward.path, onward.query) != (target.scheme, target.path, target.query):
        raise PostError(
            f"{target.geturl()} redirects to {location[:200]!r}: only the same scheme and path at another host:port are"
            " followed, because the pod's token goes with it"
        )
    return onward


def _parse(url: str) -> SplitResult:
    """Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{url!r} is not an http or https URL")
    return parts


def _once(target: SplitResult, token: str | None, body: bytes) -> tuple[int, str | None, bytes]:
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
        return response.status, response.getheader("Location"), response.read(MAX_ANSWER)
    except http.client.HTTPException as e:
        raise PostError(f"{target.geturl()} broke off: {type(e).__name__} {e}") from e
    finally:
        connection.close()
