"""Connections are told apart by address, and only those of the round are closed."""

import os
import socket
import threading
from typing import Any

import pytest

from everstep.recovery.forming import forming


def connected() -> tuple[socket.socket, socket.socket, forming.Address]:
    """The two ends of a TCP connection, and the address that one of them listened at."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    near = socket.create_connection(address)
    far, _ = listener.accept()
    listener.close()
    return near, far, address


def never() -> bool:
    return False


def test_connections_of_the_addresses_are_shut_and_others_go_on() -> None:
    (near, far, address), (other, other_far, _) = connected(), connected()
    closer = threading.Thread(target=lambda: (near.recv(1), near.close(), far.close()))
    closer.start()
    assert forming.shut({address}, never, 10.0)
    closer.join(10)
    other.sendall(b"x")
    assert other_far.recv(1) == b"x"
    for s in (other, other_far):
        s.close()


def test_connection_that_its_owner_keeps_is_told() -> None:
    near, far, address = connected()
    assert forming.shut({address}, never, 0.05) is False
    assert forming.shut({address}, lambda: True, 60.0) is True
    assert near.recv(1) == b""
    for s in (near, far):
        s.close()


def test_listener_at_one_of_the_addresses_goes_on_listening() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    assert forming.shut({listener.getsockname()}, never, 1.0)
    near = socket.create_connection(listener.getsockname())
    listener.accept()[0].close()
    for s in (near, listener):
        s.close()


def test_ipv4_in_ipv6_is_the_same_address() -> None:
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    port = listener.getsockname()[1]
    near = socket.create_connection(("127.0.0.1", port))
    far, _ = listener.accept()
    forming.shut({("127.0.0.1", port)}, never, 0.01)
    assert far.recv(1) == b""
    for s in (near, far, listener):
        s.close()


def test_address_that_something_listens_at_is_found_and_two_at_once_are_tried_again() -> None:
    made: list[socket.socket] = []

    def make() -> socket.socket:
        made.append(socket.create_server(("127.0.0.1", 0)))
        if len(made) == 1:
            made.append(socket.create_server(("127.0.0.1", 0)))  # another thread's
        return made[-1]

    found, address = forming.listening(make)
    assert (found, address) == (made[-1], made[-1].getsockname())
    assert len(made) == 3
    for s in made:
        s.close()


def test_listeners_that_keep_coming_are_an_error() -> None:
    made: list[Any] = []

    def make() -> None:
        made.extend(socket.create_server(("127.0.0.1", 0)) for _ in range(2))

    with pytest.raises(forming.LinksUnknown, match="another thread"):
        forming.listening(make)
    for s in made:
        s.close()


def test_copy_that_is_no_socket_any_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor may become a file between the look at it and the copy; nobody else closes the copy."""
    listener = socket.create_server(("127.0.0.1", 0))
    copied: list[int] = []
    duplicate = os.dup

    def becomes_a_file(descriptor: int) -> int:
        copied.append(os.open(os.devnull, os.O_RDONLY) if descriptor == listener.fileno() else duplicate(descriptor))
        return copied[-1]

    monkeypatch.setattr(os, "dup", becomes_a_file)
    with listener:
        list(forming._listeners())
    assert copied
    for descriptor in copied:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
