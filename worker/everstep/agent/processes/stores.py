"""A process that hosts the process-group stores of an agent's rounds, and does the agent's other work that needs torch.

Each round has a store of its own. So keys of an old round cannot disturb a new one, and if the host dies, only that
round is over. It is a separate process because torch's store has threads, which the fork server may not have, and
because the agent does not import torch. Invariant: a remote store that does not answer delays no store that is hosted
here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from everstep.agent.processes.control_socket import KEPT
from everstep.contract import env
from everstep.contract.addresses import loopback
from everstep.torch_private import launcher

TIMEOUT = timedelta(minutes=5)  # of a call; torch's default
BOARD_TIMEOUT = timedelta(seconds=5)
MOST_ABSENT = 64  # ranks that are read one by one if some have posted nothing
MOST_CALLS = 8  # to remote stores at a time
MAX_LOG = 256 * 1024  # bytes of torch's output that are kept


def main() -> None:
    """Serve the agent until it is gone."""
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    agent.connect(os.environ[env.AGENT_SOCKET])
    stores: list[Any] = []
    listeners: list[int] = []
    read = b""
    speaking = threading.Lock()

    def tell(**message: Any) -> None:
        with speaking:
            agent.sendall(json.dumps(message).encode() + b"\n")

    boards = _Boards(tell)
    tell(kind="stores", pid=os.getpid())
    while True:
        data, descriptors, _, _ = socket.recv_fds(agent, 4096, 16)
        if not data:
            return
        listeners += descriptors
        *lines, read = (read + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            match message["kind"]:
                case "store":
                    stores.append(_host(listeners.pop(0)))
                    del stores[:-KEPT]
                case "devices":
                    tell(kind="devices", id=message["id"], **_devices())
                case "numa":
                    tell(kind="numa", id=message["id"], **_cpus(message["mode"], message["processes"]))
                case "post" | "withdraw" | "read":
                    boards.call(message)


def _devices() -> dict[str, int]:
    """How many devices torchrun would count."""
    accelerated = torch.accelerator.is_available()
    return {
        "accelerators": torch.accelerator.device_count() if accelerated else 0,
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "xpus": torch.xpu.device_count() if torch.xpu.is_available() else 0,
        "cpus": launcher.cpus(),
    }


def _cpus(mode: str, processes: int) -> dict[str, Any]:
    """The CPUs to which torchrun would bind each local rank. It asks the GPUs, so the fork server may not do it."""
    try:
        bound = launcher.bound_cpus(mode, processes)
    except (RuntimeError, AssertionError, OSError, ValueError) as e:
        return {"error": f"{type(e).__name__}: {e}".split("\n", 1)[0]}
    if not all(bound):
        return {"error": "there is no CPU beside the GPU that this container may use"}
    return {"cpus": [sorted(cpus) for cpus in bound]}


def _host(listener: int) -> Any:
    """A store that listens on this socket."""
    known = socket.socket(fileno=listener)
    port = known.getsockname()[1]
    known.detach()  # torch's store closes it
    return TCPStore(
        loopback(), port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listener,
        use_libuv=True,
    )  # fmt: skip


class _Boards:
    """Calls to the rounds' stores, wherever they are hosted; each in a thread."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._free = threading.BoundedSemaphore(MOST_CALLS)

    def call(self, message: Mapping[str, Any]) -> None:
        if not self._free.acquire(blocking=False):
            self._tell(kind="board", id=message["id"], error=f"{MOST_CALLS} calls are under way")
            return
        threading.Thread(target=self._run, args=(message,), daemon=True).start()

    def _run(self, message: Mapping[str, Any]) -> None:
        try:
            answer = _call(message)
        except RuntimeError as e:
            answer = {"error": str(e).split("\n", 1)[0]}
            with contextlib.suppress(OSError):
                if os.fstat(2).st_size > MAX_LOG:
                    os.ftruncate(2, 0)
        finally:
            self._free.release()
        self._tell(kind="board", id=message["id"], **answer)


def _call(message: Mapping[str, Any]) -> dict[str, Any]:
    store = TCPStore(
        message["host"], message["port"], is_master=False, wait_for_workers=False, timeout=BOARD_TIMEOUT, use_libuv=True
    )
    match message["kind"]:
        case "post":
            store.set(message["key"], message["value"])
        case "withdraw":
            store.delete_key(message["key"])
        case "read":
            keys = message["keys"]
            # `multi_get` would wait for a missing key.
            if store.check(keys):
                return {"values": [value.decode() for value in store.multi_get(keys)]}
            if message["some"]:
                return {"values": [store.get(k).decode() if store.check([k]) else None for k in keys[:MOST_ABSENT]]}
    return {}
