"""A process that hosts the process-group stores of an agent's rounds, and counts its devices.

Each round has a store of its own: keys of an old round poison no new one, and when its host dies only that round is
over. It is a process of its own because torch's store has threads, which the warm parent may not have, and because the
agent does not import torch.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from everstep.contract import env

KEPT = 3  # stores: a process that leaves a round late still finds it
TIMEOUT = timedelta(minutes=5)  # of a call, as torch has by default


def main() -> None:
    """Serve the agent until it is gone."""
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    agent.connect(os.environ[env.AGENT_SOCKET])
    stores: list[Any] = []
    listeners: list[int] = []
    read = b""

    def tell(**message: Any) -> None:
        agent.sendall(json.dumps(message).encode() + b"\n")

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
                    tell(kind="devices", id=message["id"], gpus=torch.cuda.device_count(), cpus=os.cpu_count() or 1)


def _host(listener: int) -> Any:
    """A store that listens on this socket."""
    with socket.socket(fileno=os.dup(listener)) as known:
        port = known.getsockname()[1]
    return TCPStore(
        "localhost", port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listener,
        use_libuv=True,
    )  # fmt: skip
