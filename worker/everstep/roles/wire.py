"""Messages on a connection: trees of tensors, numbers and texts, each after its length in eight bytes.

They are written by `torch.save` and read with `weights_only=True`, so a message cannot run code.
"""

from __future__ import annotations

import hmac
import io
import pickle
import socket
import struct
from typing import Any

import torch

from everstep.contract.refusal import Refusal

MAX_MESSAGE = 16 << 30  # bytes; a length above it is no message of ours
SILENT_SECONDS = 20  # after which a machine that acknowledges nothing counts as lost
LENGTH = struct.Struct("!Q")
GREETING_SECONDS = 10.0  # in which the other side must show that it is what it should be
WELCOME = b"everstep"


class HubLost(ConnectionError):
    """The hub is gone, or the way to it is. `follow` looks for the next one."""


class RolesError(Refusal, RuntimeError):
    """A mistake in the script or in how it was started; trying again cannot help."""


def prepare(connection: socket.socket) -> None:
    """Let the kernel notice that the other machine is lost, and send small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", SILENT_SECONDS // 4),
        ("TCP_KEEPINTVL", SILENT_SECONDS // 4),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", SILENT_SECONDS * 1000),
    ):
        if hasattr(socket, option):  # Linux has all four
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def packed(message: Any) -> memoryview:
    """The message as bytes. Raises what `torch.save` raises for an object that cannot be sent."""
    buffer = io.BytesIO()
    buffer.write(LENGTH.pack(0))
    torch.save(message, buffer)
    size = buffer.tell() - LENGTH.size
    view = buffer.getbuffer()
    LENGTH.pack_into(view, 0, size)
    return view


def send(connection: socket.socket, data: memoryview | bytes) -> None:
    """Raises `HubLost` if the connection has ended."""
    try:
        connection.sendall(data)
    except OSError as e:
        raise HubLost(f"the connection ended while a message was sent ({e})") from e


def greet(connection: socket.socket, token: str) -> None:
    """Show the hub the token, and wait for its word. The port may be another program's by now, which would never
    answer a message. Raises `HubLost`."""
    connection.settimeout(GREETING_SECONDS)
    send(connection, token.encode())
    if exactly(connection, len(WELCOME)) != WELCOME:
        raise HubLost("the other side is no hub")
    connection.settimeout(None)


def admits(connection: socket.socket, token: str) -> bool:
    """The hub's side of `greet`. Raises `HubLost`."""
    connection.settimeout(GREETING_SECONDS)
    if not hmac.compare_digest(bytes(exactly(connection, len(token))), token.encode()):
        return False
    send(connection, WELCOME)
    connection.settimeout(None)
    return True


def received(connection: socket.socket) -> bytearray:
    """The bytes of the next message. Raises `HubLost`."""
    (size,) = LENGTH.unpack(exactly(connection, LENGTH.size))
    if size > MAX_MESSAGE:
        raise HubLost(f"the other side speaks another protocol: a message of {size:,} bytes")
    return exactly(connection, size)


def unpacked(data: bytearray) -> Any:
    """The message of these bytes. Raises `RolesError` for other objects than trees of tensors and plain values."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as e:
        raise RolesError(
            f"a message cannot be read ({str(e).splitlines()[0]}): send dictionaries, lists, tensors, numbers and texts"
        ) from e


def exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, there = memoryview(data), 0
    try:
        while there < size:
            got = connection.recv_into(view[there:])
            if got == 0:
                raise HubLost("the other side has closed the connection")
            there += got
    except HubLost:
        raise
    except OSError as e:
        raise HubLost(f"the connection ended while a message was awaited ({e})") from e
    return data
