"""How a host and a port are written together. Standard library only."""

from __future__ import annotations


def host_and_port(host: str, port: int | str) -> str:
    """`host:port`; the address of IPv6 in brackets, as a URL needs it (RFC 3986, 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
