"""An agent's id, and the address at which the others find it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from urllib.parse import urlsplit

from everstep.contract.fields import MAX_AGENT


def agent_id() -> str:
    """An id that is unique to this process, and readable in a log."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[: MAX_AGENT - 30]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def own_address(urls: tuple[str, ...]) -> str:
    """This machine's address on its route to the store: other machines may be unable to resolve its host name."""
    for url in urls:
        split = urlsplit(url)
        try:
            addresses = socket.getaddrinfo(split.hostname, split.port, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        # A name may have addresses of both families, and this machine routes to one of them.
        for family, *_, address in addresses:
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    return socket.getfqdn()
