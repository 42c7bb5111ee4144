"""How a host and a port are written together, and this machine's own address. Standard library only."""

from __future__ import annotations

import socket


def host_and_port(host: str, port: int | str) -> str:
    """`host:port`; the address of IPv6 in brackets, as a URL needs it (RFC 3986, 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def loopback() -> str:
    """The address of the loopback: that of IPv4, or that of IPv6 where the loopback has no other."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 1))  # sends nothing
    except OSError:
        return "::1"
    return "127.0.0.1"
