"""What a valid worker notices of 1,000 hostile requests a second.

    python benchmarks/hostile.py [--quick] [--json PATH] [--only MIX ...]

Three processes: the operator over an in-memory cluster (a token's review takes 5 ms), the flood, and here the worker:
four pods of one job that report and read their round as workers do. For each kind of hostile load it is measured by
turns without and with the flood, so that other work on the machine falls on both. `ratio` is the p99 with the flood
divided by that without.

`forged`, `expired`: made-up and old tokens. `half_sent`: documents of a megabyte of which one byte comes, from eight
pods of another tenant. `bad_json`: a megabyte that is no document, as fast as it goes. `reports`, `reads`: another
tenant's valid calls. `offered`: what the flood sent; it comes from an address of its own, on up to 1,000 connections,
and gives up the one that waits longest for a new one.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PARTS = Path(__file__).parent / "hostile_parts"
sys.path[:0] = [str(Path(__file__).parent), str(PARTS)]
from figures import Better, Figure, finish, parser, quantile
from flood import MIXES
from wire import Connection, read, report

RATE = 1000.0  # hostile requests a second
EACH = 20.0  # of the worker's calls a second and pod
LEAD = 1.0  # seconds of the flood before the worker is measured
PATIENCE = 10.0  # seconds for one answer


class Worker:
    """A pod that reports and reads by turns, each at its time whether the last one was slow or not."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._requests = (report(token), read(token))
        self.seconds: list[float] = []
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
            answered, sent = loop.create_future(), loop.time()
            try:
                async with asyncio.timeout(PATIENCE):
                    if connection is None or not connection.usable:
                        _, connection = await loop.create_connection(lambda: Connection(took), "127.0.0.1", self._port)
                    sent = loop.time()
                    connection.send(self._requests[number % 2])
                    status = await answered
            except (OSError, TimeoutError):
                status = 0
            self.statuses[status] += 1
            self.seconds.append(loop.time() - sent)
        if connection is not None:
            answered.cancel()
            connection.close()


async def work(port: int, tokens: list[str], seconds: float) -> tuple[list[float], Counter[int]]:
    workers = [Worker(port, token) for token in tokens]
    await asyncio.gather(*(worker.run(seconds) for worker in workers))
    return [s for worker in workers for s in worker.seconds], sum((w.statuses for w in workers), Counter())


def measure(mix: str, port: int, tokens: dict[str, list[str]], turns: int, seconds: float) -> list[Figure]:
    quiet: list[float] = []
    hostile: list[float] = []
    ratios: list[float] = []
    statuses: Counter[int] = Counter()
    answers: Counter[str] = Counter()
    sent = 0
    for _ in range(turns):
        before, _ = asyncio.run(work(port, tokens["victim"], seconds))
        quiet += before
        arguments = [mix, str(port), str(RATE), str(seconds + LEAD + 0.5)]
        with started("flood.py", *arguments) as flood:
            assert flood.stdin is not None
            assert flood.stdout is not None
            flood.stdin.write(json.dumps(tokens))
            flood.stdin.close()
            asyncio.run(asyncio.sleep(LEAD + 0.5))
            took, came = asyncio.run(work(port, tokens["victim"], seconds))
            told = json.loads(flood.stdout.read())
        hostile += took
        ratios.append(quantile(took, 0.99) / quantile(before, 0.99))
        statuses += came
        sent += told["sent"]
        answers.update(told["answers"])
    failed = sum(count for status, count in statuses.items() if status not in (200, 204, 304))
    print(f"{mix}: answers to the flood {dict(answers)}, to the worker {dict(statuses)}", file=sys.stderr)
    lower, n = Better.LOWER, len(hostile)
    return [
        Figure(f"hostile.{mix}.quiet.p50", quantile(quiet, 0.5) * 1e3, "ms", lower, n),
        Figure(f"hostile.{mix}.quiet.p99", quantile(quiet, 0.99) * 1e3, "ms", lower, n),
        Figure(f"hostile.{mix}.p50", quantile(hostile, 0.5) * 1e3, "ms", lower, n),
        Figure(f"hostile.{mix}.p99", quantile(hostile, 0.99) * 1e3, "ms", lower, n),
        Figure(f"hostile.{mix}.p99_ratio", quantile(ratios, 0.5), "1", lower, turns, goal=2),
        Figure(f"hostile.{mix}.worker_refused", failed, "1", lower, n, goal=0),
        Figure(f"hostile.{mix}.offered", sent / turns / (seconds + LEAD + 0.5), "1/s", Better.HIGHER, sent),
    ]


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    # A session of its own: Linux shares the processor between sessions first, as if it were on another machine.
    command = [sys.executable, str(PARTS / program), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def main() -> int:
    arguments: Any = parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=sorted(MIXES), default=list(MIXES), metavar="MIX")
    arguments = arguments.parse_args()
    turns, seconds = (1, 2.0) if arguments.quick else (5, 4.0)
    figures: list[Figure] = []
    for mix in arguments.only:
        operator = started("tenants_operator.py")
        try:
            assert operator.stdout is not None
            told = json.loads(operator.stdout.readline())
            asyncio.run(work(told["port"], told["tokens"]["victim"], 1.0))  # so that it is warm
            figures += measure(mix, told["port"], told["tokens"], turns, seconds)
        finally:
            operator.kill()
            operator.wait()
    return finish(figures, arguments)


if __name__ == "__main__":
    sys.exit(main())
