"""Finds and shuts down the TCP connections of one round's gloo groups.

An abandoned group must not write into the program's tensors when the step is repeated. gloo writes only data that a
connection brings. So its connections are shut down here, and then gloo closes them itself. They are found by address:
one end of each is a listener of the round, and the members have told each other their listeners' addresses. Linux only
(/proc).

Invariant: a socket is touched only if its address belongs to the round.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

Address = tuple[str, int]

POLL_SECONDS = 0.0005


class LinksUnknown(RuntimeError):
    """The connections of the round cannot be identified."""


def listening(make: Callable[[], Any], attempts: int = 3) -> tuple[Any, Address]:
    """The result of `make`, and the address at which it listens. Raises `LinksUnknown` if another thread of this
    process keeps opening listening sockets."""
    for _ in range(attempts):
        before = set(_listeners())
        made = make()
        new = {address for address in _listeners() if address not in before}
        if len(new) == 1:
            return made, new.pop()
    raise LinksUnknown("another thread opens listening sockets, so gloo's cannot be told from them")


def shut(addresses: Collection[Address], enough: Callable[[], bool], seconds: float) -> bool:
    """Shut down this process's connections that begin or end at one of the addresses. Returns whether gloo closed them
    all within `seconds`, or `enough` held."""
    held: list[tuple[int, int]] = []
    for descriptor, inode, copy in _connections():
        with copy:
            try:
                ends = {_plain(copy.getpeername()), _plain(copy.getsockname())}  # a listener has no peer: it stays
                if ends & set(addresses):
                    copy.shutdown(socket.SHUT_RDWR)
                    held.append((descriptor, inode))
            except OSError:
                continue  # not connected, or no longer
    until = time.monotonic() + seconds
    while any(_inode(descriptor) == inode for descriptor, inode in held) and not enough():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _listeners() -> Iterator[Address]:
    for _, _, copy in _connections():
        with copy, contextlib.suppress(OSError):
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield _plain(copy.getsockname())


def _connections() -> Iterator[tuple[int, int, socket.socket]]:
    """The TCP sockets of this process: descriptor, inode, and a copy to be closed."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        inode = _inode(descriptor)
        if inode is None:
            continue
        try:
            copied = os.dup(descriptor)
        except OSError:
            continue
        try:
            copy = socket.socket(fileno=copied)
        except OSError:
            os.close(copied)
            continue
        if copy.type == socket.SOCK_STREAM and copy.family in {socket.AF_INET, socket.AF_INET6}:
            yield descriptor, inode, copy
        else:
            copy.close()


def _inode(descriptor: int) -> int | None:
    """The inode of the socket behind a descriptor; None if it is no socket."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


def _plain(address: Any) -> Address:
    """The address, with IPv4-mapped IPv6 as IPv4."""
    host, port = address[0].partition("%")[0], address[1]
    ip = ipaddress.ip_address(host)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), port
