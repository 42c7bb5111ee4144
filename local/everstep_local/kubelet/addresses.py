"""Gives each pod a loopback address and a rendezvous port, before the pod starts.

There is no DNS here, and pods share one network stack. So each pod host name gets its own address in 127/8, and names
in the environment of its peers are replaced by it. (If the system routes only one address, all share 127.0.0.1.)
Torch's TCPStore listens on every interface, whatever host it is given. (Seen with torch 2.13: a second store on 29400
is refused although its address differs.) So the port of each rendezvous endpoint is replaced by one that no other pod
has.

Invariant: a name has the same address and port for every pod that uses it, until the last of them has released it.
"""

from __future__ import annotations

import errno
import re
import socket
import sys
from dataclasses import dataclass, field

# The variables whose port is that of torch's store, and not of the user's program.
ENDPOINTS = frozenset({"PET_RDZV_ENDPOINT"})
# These ports are below those that systems assign by themselves, and near the usual port of a rendezvous.
FIRST_PORT, LAST_PORT = 29400, 32767
MAX_ADDRESSES = 4000

_NAME = re.compile(
    r"(?<![\w.-])(?P<host>[a-z0-9][a-z0-9-]*)\.(?P<subdomain>[a-z0-9][a-z0-9-]*)\.(?P<namespace>[a-z0-9][a-z0-9-]*)"
    r"\.svc(?:\.cluster\.local)?(?![\w-])(?::(?P<port>\d{1,5})(?!\d))?"
)
_LOCAL = re.compile(r"(?:localhost|127\.0\.0\.1):(?P<port>\d{1,5})")


class AddressesExhausted(Exception):
    """No address or port is left. The text says which, and what to do."""


@dataclass(frozen=True, slots=True, order=True)
class PodHost:
    """A pod's host name: `<host>.<subdomain>.<namespace>.svc`. The subdomain may be empty."""

    namespace: str
    host: str
    subdomain: str = ""


@dataclass(slots=True)
class _Port:
    number: int
    lock: socket.socket | None


@dataclass(slots=True)
class _Entry:
    address: str
    holders: set[str] = field(default_factory=set)
    ports: dict[int, _Port] = field(default_factory=dict)


class Addresses:
    """The addresses of one machine. `holder`: the UID of a pod, which keeps an entry alive."""

    def __init__(self, *, linux: bool = sys.platform.startswith("linux")) -> None:
        """On Linux all of 127/8 reaches this machine, and a reserved port can be listened on."""
        self._linux = linux
        self._entries: dict[PodHost, _Entry] = {}
        self._next = 0

    def address_of(self, host: PodHost, holder: str) -> str:
        """The pod's address. Raises AddressesExhausted."""
        return self._entry(host, holder).address

    def port_of(self, host: PodHost, port: int, holder: str) -> int:
        """The port that stands for `port` of this pod. No other pod gets it meanwhile. Raises AddressesExhausted."""
        entry = self._entry(host, holder)
        if port not in entry.ports:
            entry.ports[port] = self._reserve()
        return entry.ports[port].number

    def translate(self, variable: str, value: str, own: PodHost, holder: str) -> str:
        """`value` with addresses in place of pod host names. In a rendezvous endpoint the port is replaced too, and
        localhost is `own`."""
        endpoint = variable in ENDPOINTS

        def address(match: re.Match[str]) -> str:
            host = PodHost(match["namespace"], match["host"], match["subdomain"])
            resolved = self.address_of(host, holder)
            if match["port"] is None:
                return resolved
            return f"{resolved}:{self.port_of(host, int(match['port']), holder) if endpoint else match['port']}"

        if endpoint and (local := _LOCAL.fullmatch(value)) is not None:
            return f"{self.address_of(own, holder)}:{self.port_of(own, int(local['port']), holder)}"
        return _NAME.sub(address, value)

    def before_start(self, host: PodHost) -> None:
        """Prepare for this pod to listen: except on Linux, no program can listen beside a reservation."""
        entry = self._entries.get(host)
        if entry is not None and not self._linux:
            for port in entry.ports.values():
                _close(port)

    def release(self, holder: str) -> None:
        """Release all entries of `holder`. Those without another holder become free."""
        for host, entry in list(self._entries.items()):
            entry.holders.discard(holder)
            if not entry.holders:
                for port in entry.ports.values():
                    _close(port)
                del self._entries[host]

    @property
    def in_use(self) -> int:
        """How many names are in use."""
        return len(self._entries)

    def _entry(self, host: PodHost, holder: str) -> _Entry:
        entry = self._entries.get(host)
        if entry is None:
            entry = self._entries[host] = _Entry(self._free_address())
        entry.holders.add(holder)
        return entry

    def _free_address(self) -> str:
        if not self._linux:
            return "127.0.0.1"
        used = {entry.address for entry in self._entries.values()}
        # Take the next address, not the lowest free one: connections of peers may still use the address of a pod that
        # has just ended.
        for _ in range(MAX_ADDRESSES):
            high, low = divmod(self._next, 250)
            self._next = (self._next + 1) % MAX_ADDRESSES
            address = f"127.0.{high}.{low + 2}"
            if address not in used:
                return address
        raise AddressesExhausted(f"all {MAX_ADDRESSES} loopback addresses are in use; delete finished jobs")

    def _reserve(self) -> _Port:
        used = {port.number for entry in self._entries.values() for port in entry.ports.values()}
        for number in range(FIRST_PORT, LAST_PORT + 1):
            if number not in used and (lock := _lock(number)) is not None:
                return _Port(number, lock)
        raise AddressesExhausted(
            f"no port from {FIRST_PORT} to {LAST_PORT} is free for a rendezvous; end other programs"
        )


def _lock(port: int) -> socket.socket | None:
    """A socket that keeps `port` from others on all interfaces; None if it is taken.

    It is bound exclusively, to find ports of other programs. Then it is made shareable, so that the pod's own store,
    which sets SO_REUSEADDR as every server does, can listen beside this reservation.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    lock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family is socket.AF_INET6:
            lock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        lock.bind(("::" if family is socket.AF_INET6 else "0.0.0.0", port))  # noqa: S104 - reserves, never listens
        lock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as e:
        lock.close()
        if e.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise
    return lock


def _close(port: _Port) -> None:
    if port.lock is not None:
        port.lock.close()
        port.lock = None
