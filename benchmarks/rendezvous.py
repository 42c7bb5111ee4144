"""How long agents need to agree on a round: a thousand at once, and a few that lose one of them; what watches cost.

    python benchmarks/rendezvous.py [--quick] [--json PATH]

The agents are threads over the memory store, with the driver, the participant and the document as they ship, on one
Python interpreter: decoding is shared (each document once for all of them), everything else is done a thousand times
by the same cores. Starts are spread over a second.

`operator.*`: over HTTP, with the operator in a process of its own, and the agents in eight more (`crowd`): most of the
time is theirs, which on real machines is spent side by side; `by_tls`: the same by TLS. A watch is an idle long poll;
its cost is the growth of the operator's memory (RSS).
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import aiohttp

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "rendezvous_parts")]
from crowd import at_operator
from figures import Better, Figure, finish, parser, quantile, spread

from everstep.contract.document import Member, Sizes
from everstep.contract.rounds import DOCUMENT_PATH, EXPIRATIONS_HEADER
from everstep.membership.backends.memory import MemoryStore
from everstep.membership.driver import Driver
from everstep.membership.joining import JoinSettings
from everstep.membership.proposals import Patience
from everstep.membership.world_state import Broken, Round

MANY = 1000
PROCESSES = 8
LIMIT = 120.0
SETTINGS = JoinSettings(patience=Patience(last_call=2.0, rejoin=30.0), ttl=30.0)


def crowd(count: int, seed: int) -> tuple[float, float, int]:
    """Seconds from the first start to the last agent's round, and from the last start; versions of the document."""
    random = Random(seed)
    store = MemoryStore()
    sizes = Sizes(count, count)
    starts = sorted(random.uniform(0, 1) for _ in range(count))
    drivers = [
        Driver(
            store, Member(-1, f"agent-{i:04}", address="10.0.0.1", store_port=29500), sizes, SETTINGS, random=Random(i)
        )
        for i in range(count)
    ]
    ended: list[float] = []
    rounds: list[Round] = []
    began = time.monotonic()

    def run(driver: Driver, start: float) -> None:
        time.sleep(max(0.0, began + start - time.monotonic()))
        rounds.append(driver.join(LIMIT))
        ended.append(time.monotonic())

    threads = [threading.Thread(target=run, args=pair) for pair in zip(drivers, starts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for driver in drivers:
        driver._stopping.set()  # all at once: stopping them in turn takes longer than the rest
    if {(r.number, r.world_size) for r in rounds} != {(1, count)} or {r.rank for r in rounds} != set(range(count)):
        raise SystemExit(f"{count} agents did not agree: {len(rounds)} rounds")
    return max(ended) - began, max(ended) - began - starts[-1], store.read().version


def lose_one(agents: int, rounds: int) -> list[float]:
    """Milliseconds from one agent's leaving to the round of the others, which come back when they are told."""
    took = []
    for number in range(rounds):
        store = MemoryStore()
        drivers = [
            Driver(store, Member(-1, f"agent-{i}"), Sizes(1, agents), SETTINGS, random=Random(number * agents + i))
            for i in range(agents)
        ]
        join_all(drivers)
        ended: list[float] = []

        def again(driver: Driver, ended: list[float] = ended) -> None:
            assert isinstance(driver.wait(LIMIT), Broken)
            driver.join(LIMIT)
            ended.append(time.monotonic())

        threads = [threading.Thread(target=again, args=(driver,)) for driver in drivers[1:]]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        drivers[1].evict("agent-0", "the benchmark says so")
        for thread in threads:
            thread.join()
        took.append((max(ended) - began) * 1000)
        for driver in drivers:
            driver._stopping.set()
    return took


def join_all(drivers: list[Driver]) -> None:
    threads = [threading.Thread(target=driver.join, args=(LIMIT,)) for driver in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True, slots=True)
class OperatorRun:
    """Seconds: first start to last round, last start to last round, and of the operator's processor."""

    whole: float
    after_last_start: float
    processor: float


class OperatorProcess:
    """The operator's round store over an in-memory cluster, with a job of `pods` pods."""

    def __init__(self, pods: int, *, tls: bool = False) -> None:
        path = Path(__file__).parents[1] / "tests/support/rendezvous/operator_server.py"
        command = [sys.executable, str(path), str(pods), *(["tls"] if tls else [])]
        # A session of its own: Linux shares the processor between sessions first, as if it were on another machine.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline())
        self.url, self.tokens = str(told["url"]), [str(token) for token in told["tokens"]]
        self.probes, self.ca = str(told["probes"]), str(told["ca"])

    def __enter__(self) -> OperatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def processor_seconds(self) -> float:
        """User and system, so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Resident, in MiB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def operator_crowd(count: int, processes: int, seed: int, *, tls: bool = False) -> OperatorRun:
    """The agents meet over HTTP, or over TLS."""
    with OperatorProcess(count, tls=tls) as operator:
        before = operator.processor_seconds()
        whole, after_last = at_operator(operator.url, operator.tokens, processes, seed, operator.ca)
        return OperatorRun(whole, after_last, operator.processor_seconds() - before)


async def watch_memory(count: int) -> tuple[float, float]:
    """The operator's memory with `count` idle long polls, and by how much it grew for them, in MiB."""
    with OperatorProcess(count // 8) as operator:
        headers = [{"Authorization": f"Bearer {token}"} for token in operator.tokens]
        everything = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(operator.url, connector=everything) as session:
            for header in headers:  # so that every pod is known before
                async with session.get(DOCUMENT_PATH, headers=header) as answer:
                    seen: dict[str, str | int] = {
                        "version": 0,
                        "lapses": answer.headers[EXPIRATIONS_HEADER],
                        "wait": 30,
                    }
            before = operator.memory()
            polls = [
                asyncio.create_task(session.get(DOCUMENT_PATH, params=seen, headers=headers[i % len(headers)]))
                for i in range(count)
            ]
            while await waiting(session, operator.probes) < count:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.2)
            grown = operator.memory()
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)
        return grown, grown - before


async def waiting(session: aiohttp.ClientSession, probes: str) -> int:
    async with session.get(f"{probes}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return int(float(next(line for line in lines if line.startswith("everstep_round_watches ")).split()[1]))


def main() -> int:
    arguments = parser(__doc__).parse_args()
    turns = 1 if arguments.quick else 5
    lost = lose_one(3, 20 if arguments.quick else 200)
    crowds = [crowd(MANY, seed) for seed in range(turns)]
    agents, watches = (200, 1000) if arguments.quick else (MANY, 10_000)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (min(20_000, hard := resource.getrlimit(resource.RLIMIT_NOFILE)[1]), hard)
    )
    over_http, over_tls = (
        [operator_crowd(agents, PROCESSES, seed, tls=tls) for seed in range(turns)] for tls in (False, True)
    )
    memory, growth = asyncio.run(watch_memory(watches))
    lower = Better.LOWER
    figures = [
        Figure(f"join.{MANY}_agents.whole.max", max(c[0] for c in crowds), "s", lower, turns, goal=5),
        Figure(f"join.{MANY}_agents.after_last_start.max", max(c[1] for c in crowds), "s", lower, turns),
        Figure(f"join.{MANY}_agents.writes.max", float(max(c[2] for c in crowds)), "1", lower, turns),
        Figure("lose_one_of_3.p50", quantile(lost, 0.5), "ms", lower, len(lost)),
        Figure("lose_one_of_3.p99", quantile(lost, 0.99), "ms", lower, len(lost)),
    ]
    figures += [
        *spread(f"operator.join.{agents}_agents.whole", [run.whole for run in over_http], "s", goal_p95=5),
        Figure(
            f"operator.join.{agents}_agents.after_last_start.max",
            max(run.after_last_start for run in over_http),
            "s",
            lower,
            turns,
        ),
        Figure(
            f"operator.join.{agents}_agents.processor.max", max(run.processor for run in over_http), "s", lower, turns
        ),
        *spread(f"operator.join.{agents}_agents_by_tls.whole", [run.whole for run in over_tls], "s"),
        Figure(
            f"operator.join.{agents}_agents_by_tls.processor.max",
            max(run.processor for run in over_tls),
            "s",
            lower,
            turns,
        ),
        Figure(f"operator.{watches}_watches.memory", memory, "MiB", lower, 1, goal=512),
        Figure(f"operator.{watches}_watches.memory.growth", growth, "MiB", lower, 1),
    ]
    return finish(figures, arguments)


if __name__ == "__main__":
    sys.exit(main())
