"""Machines on one network that a test can break: each a network namespace of this kernel, joined by a bridge.

Needs root, `ip` and `iptables`. Whatever a thread does in `inside` has that machine's network, and so have the threads
and processes that it starts there. The bridge is in the namespace of the first machine, so that no rule of the real
machine applies to it. Invariant: namespaces are named after the process that made them, and those of processes that
have ended are taken down with the next ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from itertools import count

from testcluster.proc import run

PREFIX = "everstep-test"
NETWORK = "10.231.7"
CLONE_NEWNET = 0x40000000
_made = count()


class Machines:
    """`names[0]` has the bridge. Use as a context manager."""

    def __init__(self, *names: str) -> None:
        here = f"{PREFIX}-{os.getpid()}-{next(_made)}"
        self._spaces = {name: f"{here}-{name}" for name in names}
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}

    def __enter__(self) -> Machines:
        _sweep()
        try:
            hub, *others = self._spaces
            for space in self._spaces.values():
                run("ip", "netns", "add", space)
                self._ip(space, "link", "set", "lo", "up")
            self._ip(self._spaces[hub], "link", "add", "bridge", "type", "bridge")
            self._up(self._spaces[hub], "bridge", self.addresses[hub])
            for number, name in enumerate(others):
                space, port = self._spaces[name], f"port{number}"
                self._ip(space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._spaces[hub])
                self._ip(self._spaces[hub], "link", "set", port, "master", "bridge", "up")
                self._up(space, "eth0", self.addresses[name])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for space in self._spaces.values():
            with contextlib.suppress(Exception):
                run("ip", "netns", "del", space)

    def space(self, name: str) -> str:
        """The machine's namespace, as `ip netns` calls it."""
        return self._spaces[name]

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[str]:
        """This thread is on that machine; its address."""
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self._spaces[name]}") as space:
            _enter(space.fileno())
            try:
                yield self.addresses[name]
            finally:
                _enter(home.fileno())

    def drop(self, sender: str, receiver: str, share: float = 1.0) -> None:
        """What one machine sends to another is lost: nobody is told, no connection is ended."""
        chance = () if share == 1.0 else ("-m", "statistic", "--mode", "random", "--probability", str(share))
        self._iptables(receiver, "-A", "INPUT", "-s", self.addresses[sender], *chance, "-j", "DROP")

    def heal(self) -> None:
        """Nothing is lost any more."""
        for name in self._spaces:
            self._iptables(name, "-F", "INPUT")

    def _iptables(self, name: str, *rule: str) -> None:
        run("ip", "netns", "exec", self._spaces[name], "iptables", "-w", *rule)

    def _up(self, space: str, device: str, address: str) -> None:
        self._ip(space, "address", "add", f"{address}/24", "dev", device)
        self._ip(space, "link", "set", device, "up")

    @staticmethod
    def _ip(space: str, *argv: str) -> None:
        run("ip", "-n", space, *argv)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns: a test with network namespaces needs root")


def _sweep() -> None:
    for line in run("ip", "netns", "list").splitlines():
        space = line.split()[0] if line.strip() else ""
        if not space.startswith(f"{PREFIX}-"):
            continue
        pid = space.removeprefix(f"{PREFIX}-").split("-")[0]
        if not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(Exception):
                run("ip", "netns", "del", space)
