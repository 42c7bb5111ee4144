"""One world of ranks (gloo processes on this machine), and the acts that the benchmark asks of all of them at once.

The parent names an act; every rank meets at a barrier, does it, and answers with its `Sample`. A rank that fails says
why and ends the run; a rank that does not answer in `LIMIT` seconds does too.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from checkpoint_parts.meter import Joint, Sample

from testcluster.daemon import free_ports

LIMIT = 600.0  # seconds for one act


class World:
    """`ranks` processes, each with the state of about `size` bytes (`mapped`: see `Trained`). A context manager."""

    def __init__(self, ranks: int, size: int, env: Mapping[str, str] | None = None, mapped: bool = False) -> None:
        (port,) = free_ports(1)
        os.environ.update(env or {}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, ranks, size, mapped), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        for connection in self._connections:
            if kind is None:
                connection.send(None)
            connection.close()
        for process in self._processes:
            process.join(30 if kind is None else 0.1)
            process.kill()

    def ask(self, act: str, **arguments: Any) -> list[Any]:
        """What every rank answers, in rank order."""
        for connection in self._connections:
            connection.send((act, arguments))
        answers: dict[Any, Any] = {}
        until = time.monotonic() + LIMIT
        while missing := [c for c in self._connections if c not in answers]:
            ready = wait(missing, max(0.0, until - time.monotonic()))
            if not ready:
                raise RuntimeError(f"{act}: {len(missing)} ranks did not answer within {LIMIT:.0f} s")
            answers |= {connection: self._answer(act, connection) for connection in ready}
        return [answers[connection] for connection in self._connections]

    def _answer(self, act: str, connection: Any) -> Any:
        rank = self._connections.index(connection)
        try:
            error, answer = connection.recv()
        except EOFError:
            self._processes[rank].join(1)
            code = self._processes[rank].exitcode
            raise RuntimeError(f"{act}: rank {rank} ended with {code} (-9: perhaps the kernel needed memory)") from None
        if error:
            raise RuntimeError(f"{act}: rank {rank}: {error}")
        return answer

    def time(self, act: str, **arguments: Any) -> Joint:
        """One measured act of all ranks."""
        samples = self.ask(act, **arguments)
        assert all(isinstance(s, Sample) for s in samples)
        return Joint.of(samples)


def serve(connection: Connection, rank: int, ranks: int, size: int, mapped: bool) -> None:
    """A rank's life: do what is asked until there is nothing more."""
    import torch  # noqa: PLC0415  the parent needs no torch
    import torch.distributed as dist  # noqa: PLC0415
    from checkpoint_parts.acts import Acts  # noqa: PLC0415

    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # DCP's, about saves one after another
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    acts = Acts(rank, ranks, size, mapped)
    while (asked := connection.recv()) is not None:
        name, arguments = asked
        try:
            dist.barrier()
            connection.send((None, getattr(acts, name)(**arguments)))
        except Exception:
            connection.send((traceback.format_exc(), None))
    dist.destroy_process_group()


def warm(folder: Path) -> None:
    """Read every file below the folder once, so that the next reader finds it in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(2**24):
                    pass
