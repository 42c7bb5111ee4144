"""What a valid worker notices of 1,000 hostile requests a second.

    python benchmarks/hostile.py [--quick] [--json PATH] [--only MIX ...]

Processes: the operator over an in-memory cluster (a token's review takes 5 ms), the flood, and here the worker:
four pods of one job that report and read their round as workers do. For each kind of hostile load it is measured by
turns without and with the flood, so that other work on the machine falls on both. `p99_ratio` is the p99 with the flood
divided by that without, and has the goal.

Where the processes have no core each, that ratio also counts what the flood and the machine take from the worker, with
which the operator has nothing to do. More figures tell them apart. `elsewhere.p99`: of the quiet operator while the
same flood, at the same rate, is sent to a second operator on this machine. `own_ratio`, which has a goal too: the p99
with the flood divided by that, so what this operator makes of it. `work.p99`: the processor time that the operator
spent between a call and its answer, on whomever, by the kernel's clock of its process. `work_ratio` is that divided by
the same without the flood.

`forged`, `expired`: made-up and old tokens. `half_sent`: documents of a megabyte of which one byte comes, from eight
pods of another tenant. `bad_json`: a megabyte that is no document, as fast as it goes. `reports`, `reads`: another
tenant's valid calls. `chunks`: chunks of one byte, with extensions. `slow_heads`: one byte on each connection.
`offered`: what the flood sent; it comes from eight addresses (`slow_heads`: 60), on up to 1,000 connections, and gives
up the one that waits longest for a new one. No NetworkPolicy stands in between: a worker's pod can send all of these.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = Path(__file__).parent / "hostile_parts"
sys.path[:0] = [str(Path(__file__).parent), str(PARTS)]
from figures import Better, Figure, finish, parser, quantile
from flood import MIXES
from wire import Connection, read, report

RATE = 1000.0  # hostile requests a second
EACH = 20.0  # of the worker's calls a second and pod
START = 0.5  # seconds until a flood has begun
PATIENCE = 10.0  # seconds for one answer


class Worker:
    """A pod that reports and reads by turns, each at its time whether the last one was slow or not."""

    def __init__(self, port: int, token: str, clock: int) -> None:
        self._port, self._clock = port, clock
        self._requests = (report(token), read(token))
        self.seconds: list[float] = []
        self.work: list[float] = []  # seconds of the operator's
        self.statuses: Counter[int] = Counter()

    async def run(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        connection: Connection | None = None
        answered: asyncio.Future[int] = loop.create_future()

        def took(_: Connection, status: int) -> None:
            if not answered.done():
                answered.set_result(status)

        for number in range(int(seconds * EACH)):
            due = began + number / EACH
            await asyncio.sleep(max(0.0, due - loop.time()))
            answered, sent, spent = loop.create_future(), loop.time(), time.clock_gettime(self._clock)
            try:
                async with asyncio.timeout(PATIENCE):
                    if connection is None or not connection.usable:
                        _, connection = await loop.create_connection(lambda: Connection(took), "127.0.0.1", self._port)
                    sent, spent = loop.time(), time.clock_gettime(self._clock)
                    connection.send(self._requests[number % 2])
                    status = await answered
            except (OSError, TimeoutError):
                status = 0
            self.statuses[status] += 1
            self.seconds.append(loop.time() - sent)
            self.work.append(time.clock_gettime(self._clock) - spent)
        if connection is not None:
            answered.cancel()
            connection.close()


@dataclass
class Measured:
    """Of one kind of turn. `p99s`: of each turn."""

    seconds: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    p99s: list[float] = field(default_factory=list)

    def p99(self) -> float:
        return quantile(self.seconds, 0.99) * 1e3

    def work_p99(self) -> float:
        return quantile(self.work, 0.99) * 1e3


@dataclass
class Server:
    """An operator in a process of its own."""

    process: subprocess.Popen[str]
    port: int
    tokens: dict[str, list[str]]

    @property
    def clock(self) -> int:
        """Of the processor time that it has used: clock_getcpuclockid(3)."""
        return (~self.process.pid << 3) | 2

    def work(self, seconds: float, into: Measured) -> None:
        """Let the workers speak for so long."""

        async def speak() -> list[Worker]:
            workers = [Worker(self.port, token, self.clock) for token in self.tokens["victim"]]
            await asyncio.gather(*(worker.run(seconds) for worker in workers))
            return workers

        workers = asyncio.run(speak())
        took = [s for worker in workers for s in worker.seconds]
        into.seconds += took
        into.work += [s for worker in workers for s in worker.work]
        into.p99s.append(quantile(took, 0.99))
        for worker in workers:
            into.statuses += worker.statuses


@contextmanager
def operator() -> Iterator[Server]:
    process = started("tenants_operator.py")
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        server = Server(process, told["port"], told["tokens"])
        server.work(1.0, Measured())  # so that it is warm
        yield server
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Times:
    """Of one turn, in seconds: `lead` of the flood before the worker is measured, and `measured`."""

    lead: float = 1.0
    measured: float = 3.0

    @property
    def flood(self) -> float:
        return START + self.lead + self.measured


def flooded(mix: str, target: Server, victim: Server, times: Times, into: Measured) -> dict[str, Any]:
    """What the flood has to tell."""
    arguments = [mix, str(target.port), str(RATE), str(times.flood)]
    with started("flood.py", *arguments) as flood:
        assert flood.stdin is not None
        assert flood.stdout is not None
        flood.stdin.write(json.dumps(target.tokens))
        flood.stdin.close()
        time.sleep(START + times.lead)
        victim.work(times.measured, into)
        told: dict[str, Any] = json.loads(flood.stdout.read())
    return told


def measure(mix: str, victim: Server, other: Server, turns: int, times: Times) -> list[Figure]:
    quiet, hostile, elsewhere = Measured(), Measured(), Measured()
    answers: Counter[str] = Counter()
    sent = 0
    for _ in range(turns):
        victim.work(times.measured, quiet)
        told = flooded(mix, victim, victim, times, hostile)
        flooded(mix, other, victim, times, elsewhere)
        sent += told["sent"]
        answers.update(told["answers"])
    statuses = hostile.statuses
    failed = sum(count for status, count in statuses.items() if status not in (200, 204, 304))
    print(f"{mix}: answers to the flood {dict(answers)}, to the worker {dict(statuses)}", file=sys.stderr)
    ratios = [with_ / without for with_, without in zip(hostile.p99s, quiet.p99s, strict=True)]
    own = [here / there for here, there in zip(hostile.p99s, elsewhere.p99s, strict=True)]
    lower, n, name = Better.LOWER, len(hostile.seconds), f"hostile.{mix}"
    return [
        Figure(f"{name}.quiet.p50", quantile(quiet.seconds, 0.5) * 1e3, "ms", lower, n),
        Figure(f"{name}.quiet.p99", quiet.p99(), "ms", lower, n),
        Figure(f"{name}.quiet.work.p99", quiet.work_p99(), "ms", lower, n),
        Figure(f"{name}.elsewhere.p99", elsewhere.p99(), "ms", lower, n),
        Figure(f"{name}.p50", quantile(hostile.seconds, 0.5) * 1e3, "ms", lower, n),
        Figure(f"{name}.p99", hostile.p99(), "ms", lower, n),
        Figure(f"{name}.work.p99", hostile.work_p99(), "ms", lower, n),
        Figure(f"{name}.work_ratio", hostile.work_p99() / quiet.work_p99(), "1", lower, n),
        Figure(f"{name}.p99_ratio", quantile(ratios, 0.5), "1", lower, turns, goal=2),
        Figure(f"{name}.own_ratio", quantile(own, 0.5), "1", lower, turns, goal=2),
        Figure(f"{name}.worker_refused", failed, "1", lower, n, goal=0),
        Figure(f"{name}.offered", sent / turns / times.flood, "1/s", Better.HIGHER, sent),
    ]


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    # A session of its own: Linux shares the processor between sessions first, as if it were on another machine.
    command = [sys.executable, str(PARTS / program), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def main() -> int:
    arguments: Any = parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=sorted(MIXES), default=list(MIXES), metavar="MIX")
    arguments = arguments.parse_args()
    turns, times = (1, Times(0.5, 1.0)) if arguments.quick else (5, Times())
    figures: list[Figure] = []
    with operator() as victim, operator() as other:
        for mix in arguments.only:
            figures += measure(mix, victim, other, turns, times)
    return finish(figures, arguments)


if __name__ == "__main__":
    sys.exit(main())
