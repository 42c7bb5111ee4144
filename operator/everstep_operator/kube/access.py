"""What a session has to know to reach the API server, whatever named it."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """`server`: its URL. `authority`: what names the CA, for errors. `authorization` is called before each request and
    returns the header's value, empty for none. `proxy`, its headers and `tls_server_name`: only a kubeconfig has
    them."""

    server: str
    authority: str
    tls: ssl.SSLContext
    authorization: Callable[[], Awaitable[str]]
    proxy: str | None = None
    proxy_headers: Mapping[str, str] | None = None
    tls_server_name: str | None = None
