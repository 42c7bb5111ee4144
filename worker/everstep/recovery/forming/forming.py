"""Makes the process groups of a round, and closes them so that their collectives have no further effect.

Forming waits for the other members, any of which may die, and gloo's waits cannot be ended. So it runs in a thread that
is abandoned when a newer round comes. Invariant: after `close` no collective of the round writes into the program's
tensors.
"""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from everstep.contract.addresses import loopback
from everstep.membership.torch_log import warnings_off
from everstep.recovery.announcements import AnnouncedRound
from everstep.recovery.errors import LoopError
from everstep.recovery.forming import same_calls
from everstep.torch_private import groups

# --- gloo sockets
# Finds and shuts down the TCP connections of one round's gloo groups. An abandoned group must not write into the
# program's tensors when the step is repeated. gloo writes only data that a connection brings. So its connections are
# shut down here, and then gloo closes them itself. They are found by address: one end of each is a listener of the
# round, and the members have told each other their listeners' addresses. Linux only (/proc). Invariant: a socket is
# touched only if its address belongs to the round.

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
    shut_down: list[tuple[int, int]] = []
    for descriptor, inode, copy in _connections():
        with copy:
            try:
                ends = {_plain(copy.getpeername()), _plain(copy.getsockname())}  # a listener has no peer: it stays
                if ends & set(addresses):
                    copy.shutdown(socket.SHUT_RDWR)
                    shut_down.append((descriptor, inode))
            except OSError:
                continue  # not connected, or no longer
    until = time.monotonic() + seconds
    while any(_inode(descriptor) == inode for descriptor, inode in shut_down) and not enough():
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
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _plain(address: Any) -> Address:
    """The address, with IPv4-mapped IPv6 as IPv4."""
    host, port = address[0].partition("%")[0], address[1]
    ip = ipaddress.ip_address(host)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), port


# --- forming

# torch's default, and how long a rank may lag behind the others. None of our waits depends on it. But if gloo lost a
# transfer, its thread lives for this long.
LOST_SECONDS = 1800.0
CLOSE_SECONDS = 1.0
COMPUTE_SECONDS = 0.1  # longer than gloo takes to reduce data that has arrived
REFUSED, UNCERTAIN = "refused: ", "refused, and maybe by chance: "  # before a `LoopError` of a member
ABORT_SECONDS = 10.0  # for a device to end the collectives of an abandoned round


# A gloo device ends by waiting for its thread. A fork does not copy that thread, and its handle may name another thread
# of the child by then, so that the child aborts or hangs. Errors of lost peers keep devices in cycles. So in a child,
# such as a loader's worker, the collector leaves alone what the parent had.
os.register_at_fork(after_in_child=gc.freeze)


class FormingFailed(RuntimeError):
    """The round did not form in this process; the next one may."""


@dataclass(slots=True)
class FormedRound:
    """The groups of one round: `main` for the program, `control` for our own agreements and transfers, and those of a
    mesh. `abort` ends the collectives of an accelerator."""

    round: AnnouncedRound
    main: Any
    control: Any
    addresses: frozenset[Address]
    store: Any
    abort: Callable[[], None] | None = None
    # A mesh's groups, each with its `abort`, in the order of `form`'s `parts`.
    parts: list[tuple[Any, Callable[[], None] | None]] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)  # gloo's devices


@dataclass(frozen=True, slots=True)
class Subgroup:
    """A group of some of a round's members. They all use the same name for it, and no other group has that name."""

    name: str
    rank: int
    size: int


def alone() -> Any:
    """The group of a world of one, in which a script builds its objects before it joins its first round."""
    store = HashStore()
    device = groups.gloo_device(hostname=loopback())  # nobody connects to it
    main, _ = _with_devices(_gloo(store, 0, 1, device), 0, 1, store)
    return main


def form(
    round_: AnnouncedRound, newer: Callable[[], bool], seconds: float, parts: Sequence[Subgroup] = (), made: str = ""
) -> FormedRound:
    """Meet the members of a round. Raises `FormingFailed` once `newer()` holds, after `seconds`, or on an error. Raises
    `LoopError` on all members if their scripts have `made` different groups; `made` describes them in words."""
    result: list[FormedRound | BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            result.append(_form(round_, seconds, parts, made))
        except BaseException as e:
            result.append(e)
        done.set()

    until = time.monotonic() + seconds
    with warnings_off():  # members may die now, and the error reports that
        threading.Thread(target=run, name=f"everstep-form-{round_.number}", daemon=True).start()
        while not done.wait(0.002):
            if newer():
                raise FormingFailed(f"round {round_.number} was overtaken while it formed")
            if time.monotonic() > until:
                raise FormingFailed(f"round {round_.number} did not form within {seconds:g} s")
    match result[0]:
        case FormedRound() as formed:
            return formed
        case LoopError() as e:
            raise e
        case BaseException() as e:
            raise FormingFailed(f"round {round_.number}: {e}") from e


def close(formed: FormedRound, works: list[Any], on_device: list[Any]) -> None:
    """Close the connections of an abandoned round. Its unfinished `works` then end, or hang without any effect. Raises
    `FormingFailed` if gloo keeps both the works and the connections, or if a device goes on with its own works: they
    could still write, which makes a repeated step unsafe."""

    def over() -> bool:
        # gloo releases the tensors with the work, even if it leaves a connection open whose receiver is gone.
        return all(work.is_completed() for work in works)

    if not shut(formed.addresses, over, CLOSE_SECONDS):
        raise FormingFailed(f"round {formed.round.number}: gloo did not close its connections in {CLOSE_SECONDS:g} s")
    # A gloo thread may still be reducing data that had arrived. A thread that lost a transfer never ends, but it writes
    # nothing.
    until = time.monotonic() + COMPUTE_SECONDS
    while not over() and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    until = time.monotonic() + ABORT_SECONDS
    while not all(work.is_completed() for work in on_device):
        if time.monotonic() > until:
            raise FormingFailed(
                f"round {formed.round.number}: the device did not end its collectives in {ABORT_SECONDS:g} s"
            )
        time.sleep(POLL_SECONDS)
    # Destroying a group waits for its threads, and a thread that lost a transfer ends only with gloo's own timeout.
    threading.Thread(target=_drop, args=(formed,), name="everstep-drop", daemon=True).start()


def _drop(formed: FormedRound) -> None:
    formed.main = formed.control = formed.abort = None
    formed.parts.clear()
    formed.keep.clear()
    formed.store = None


def _form(round_: AnnouncedRound, seconds: float, parts: Sequence[Subgroup], made: str) -> FormedRound:
    host, port = round_.store
    client = TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds), use_libuv=True
    )
    store = PrefixStore(f"round-{round_.number}", client)
    device, address = listening(partial(gloo_device, host, port))
    store.set(f"link/{round_.rank}", f"{address[0]} {address[1]}")
    _check_made(store, round_, made)
    gloo = _gloo(PrefixStore("main", store), round_.rank, round_.world_size, device)
    main, abort = _with_devices(gloo, round_.rank, round_.world_size, store)
    control = _gloo(PrefixStore("control", store), round_.rank, round_.world_size, device)
    inner = []
    for p in parts:
        own = PrefixStore(p.name, store)
        inner.append(_with_devices(_gloo(own, p.rank, p.size, device), p.rank, p.size, own))
    addresses = set()
    for rank in range(round_.world_size):
        name, number = store.get(f"link/{rank}").decode().split()
        addresses.add((name, int(number)))
    return FormedRound(round_, main, control, frozenset(addresses), store, abort, inner, [device])


def _check_made(store: Any, round_: AnnouncedRound, made: str) -> None:
    """Check that all members have made the same groups: a group that a member lacks would wait for it for ever. If one
    member has found an error in the script, all raise it."""
    store.set(f"made/{round_.rank}", made)
    values = store.multi_get([f"made/{rank}" for rank in range(round_.world_size)])
    by_rank = [value.decode() for value in values]
    for other in by_rank:
        for prefix, certain in ((REFUSED, True), (UNCERTAIN, False)):
            if other.startswith(prefix):
                raise LoopError(other.removeprefix(prefix), certain=certain)
    same_calls.check(by_rank)


def _with_devices(gloo: Any, rank: int, size: int, store: Any) -> tuple[Any, Callable[[], None] | None]:
    """Add NCCL if there are GPUs, and return the function that aborts it. UNPROVEN: untested on GPUs."""
    if not torch.cuda.is_available():
        return gloo, None
    # 2: clean up after an error, but keep the process. torchrun sets 1, which ends it; here it recovers.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    nccl = groups.nccl(PrefixStore("nccl", store), rank, size, timedelta(seconds=LOST_SECONDS))
    kinds = dist.ProcessGroup.BackendType
    backends = {"cpu": (kinds.GLOO, gloo), "cuda": (kinds.NCCL, nccl)}
    return groups.of_backends(store, rank, size, backends), nccl.abort


def _gloo(store: Any, rank: int, size: int, device: Any) -> Any:
    return groups.gloo(store, rank, size, device, threads=2, timeout=timedelta(seconds=LOST_SECONDS))


def gloo_device(host: str, port: int) -> Any:
    """A gloo device that listens on GLOO_SOCKET_IFNAME, or else at this machine's address on its route to the round's
    store. torch's default is the address of the host name, which on many machines is a local one."""
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return groups.gloo_device(interface=names.split(",")[0])
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return groups.gloo_device(hostname=probe.getsockname()[0])
    except OSError:
        return groups.gloo_device()
