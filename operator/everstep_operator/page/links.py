"""Who may read on one machine: whoever has the address that was printed, with its random token.

The token becomes a cookie with the first request, so that it leaves the address bar. Requests under a host name that is
no loopback address are refused: another site's name may point here (DNS rebinding). Invariant: without the token
nothing about a job is answered.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Any

from aiohttp import hdrs, web

from everstep_operator.page.model import May

_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")


async def _everything(_: str) -> bool:
    return True


class LinkAccess:
    """`token` is part of the address that is printed."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(24)
        # Cookies do not know ports: two pages of one machine must not take each other's.
        self._cookie = f"everstep-{secrets.token_hex(4)}"

    def add_to(self, router: web.UrlDispatcher) -> None:
        """No path of its own."""

    def shown(self, request: web.Request) -> Mapping[str, Any]:
        return {}

    async def admit(self, request: web.Request) -> May | web.Response:
        if not _LOOPBACK.fullmatch(request.host):
            return web.Response(status=403, text="this page is for the machine that it runs on: open 127.0.0.1\n")
        offered = request.query.get("token")
        if offered is not None and self._is_token(offered):
            path = "/" + request.rel_url.raw_path.lstrip("/")  # two slashes would name another host
            answer = web.Response(status=303, headers={hdrs.LOCATION: path})
            answer.set_cookie(self._cookie, self.token, httponly=True, samesite="Strict", path="/")
            return answer
        if self._is_token(request.cookies.get(self._cookie, "")):
            return _everything
        return web.Response(status=403, text="open the address that the command printed: it has a token\n")

    def _is_token(self, offered: str) -> bool:
        return hmac.compare_digest(offered.encode(errors="replace"), self.token.encode())
