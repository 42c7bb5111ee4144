"""A name whose servers are late leads to the addresses that it had last."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from everstep.membership.backends.names import LATE, Names

HOST = "everstep.everstep-system.svc"
FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.96.0.7", 80))]
OTHER = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.96.0.8", 80))]


class Servers:
    """Of names: `answer` is what they give, and `away` keeps them from it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.answer: Any = FOUND
        self.away, self.calls = threading.Event(), 0
        self.away.set()  # nobody waits
        patch.setattr("everstep.membership.backends.names.socket.getaddrinfo", self._find)

    def _find(self, host: str, port: int, **_: Any) -> Any:
        self.calls += 1
        assert (host, port) == (HOST, 80)
        assert self.away.wait(60)
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(monkeypatch)


def test_servers_that_fall_silent_cost_a_moment_and_are_asked_once(servers: Servers) -> None:
    """A node is lost with one of the cluster's two name servers: a lookup that it gets takes five seconds and more."""
    found = Names()
    assert found.find(HOST, 80) == FOUND
    servers.away.clear()
    began = time.monotonic()
    for _ in range(5):
        assert found.find(HOST, 80) == FOUND
    assert LATE <= time.monotonic() - began < 2 * LATE + 1, "the first waits, the others know"
    assert servers.calls == 2
    servers.answer = OTHER
    servers.away.set()
    until = time.monotonic() + 30
    while found.find(HOST, 80) != OTHER:
        assert time.monotonic() < until
    servers.answer = FOUND
    assert found.find(HOST, 80) == FOUND, "servers that answer are asked each time"


def test_name_that_is_not_known_yet_is_waited_for(servers: Servers) -> None:
    servers.away.clear()
    threading.Timer(2 * LATE, servers.away.set).start()
    assert Names().find(HOST, 80) == FOUND


def test_name_that_is_gone_leads_nowhere_and_one_that_cannot_be_looked_up_does(servers: Servers) -> None:
    found = Names()
    found.find(HOST, 80)
    servers.answer = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert found.find(HOST, 80) == FOUND
    servers.answer = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(socket.gaierror, match="not known"):
        found.find(HOST, 80)
    servers.answer = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    with pytest.raises(socket.gaierror, match="Temporary"):
        found.find(HOST, 80)


def test_address_is_not_looked_up_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.membership.backends.names.threading.Thread", lambda **_: pytest.fail("a thread"))
    assert Names().find("127.0.0.1", 80)[0][4] == ("127.0.0.1", 80)
