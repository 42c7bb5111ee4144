"""Sockets that listen, of either address family. Knows no protocol.

A cluster is IPv4 only, IPv6 only or dual-stack, and the operator cannot choose: so it listens on both. One socket takes
both where the kernel has IPv6: then any free port is one port.
"""

from __future__ import annotations

import asyncio
import socket

ALL = ("", "::")


async def listen(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of `host`; empty: all addresses of this machine. Port 0: any free one.

    Raises OSError when an address is taken or is not this machine's.
    """
    if host in ALL and socket.has_dualstack_ipv6():
        return [_bound(("::", port), socket.AF_INET6, both=True)]
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # noqa: S104
    bound: list[socket.socket] = []
    try:
        for family, *_, address in dict.fromkeys(addresses):
            at = bound[0].getsockname()[1] if bound else port
            bound.append(_bound((str(address[0]), at), family))
    except BaseException:
        for listener in bound:
            listener.close()
        raise
    return bound


def _bound(address: tuple[str, int], family: int, *, both: bool = False) -> socket.socket:
    made = socket.create_server(address, family=family, dualstack_ipv6=both)
    made.setblocking(False)
    return made
