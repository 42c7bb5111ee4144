"""What an agent calls itself, and where the others find it."""

from __future__ import annotations

import os
import re
import secrets
import socket
from urllib.parse import urlsplit

from everstep.contract.fields import MAX_AGENT


def agent_id() -> str:
    """Unique to this life of this process, and readable in a log."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[: MAX_AGENT - 30]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def own_address(urls: tuple[str, ...]) -> str:
    """The address of this machine on the way to the store: the name that a machine gives itself need not be known."""
    for url in urls:
        split = urlsplit(url)
        try:
            found = socket.getaddrinfo(split.hostname, split.port, type=socket.SOCK_DGRAM)
            with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[0][4])  # sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.getfqdn()
