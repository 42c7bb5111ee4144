"""Many agents of one job that start within a second, in a few processes that stand for many machines.

Each agent is a driver with a store client of its own, as it ships, in threads; one process holds some hundred of them,
so that their Python interpreter is not what is measured. A process is told where the store is, by one line of JSON on
its standard input, makes its agents, says so, is told when to begin, and prints when each agent asked and had its
round. Clocks: CLOCK_MONOTONIC is one for all processes of a machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from everstep.contract.document import Member, Sizes
from everstep.membership.backends.etcd import EtcdStore
from everstep.membership.backends.etcd_http import Gateway
from everstep.membership.backends.operator_calls import OperatorCalls
from everstep.membership.backends.operator_store import HttpStore
from everstep.membership.driver import Driver
from everstep.membership.joining import JoinSettings
from everstep.membership.proposals import Patience
from everstep.membership.store import RoundStore

LIMIT = 60.0
SETTINGS = JoinSettings(patience=Patience(last_call=2.0, rejoin=30.0), ttl=30.0)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Where `count` agents meet: at an operator, with a file of a pod's token for each, or in an etcd. `ca`: PEM of the
    authority of an operator at https://."""

    url: str
    token_files: tuple[str, ...]  # none: `url` is an etcd's
    job: str
    count: int
    ca: str = ""

    def store(self, i: int) -> RoundStore:
        if self.token_files:
            return HttpStore(OperatorCalls(self.url, self.token_files[i], ca=self.ca))
        return EtcdStore(Gateway((self.url,)), self.job)


@dataclass(frozen=True, slots=True)
class Joined:
    """Of one agent: seconds on the common clock, and what it was told."""

    asked: float
    ended: float
    round: int
    rank: int
    world_size: int


def gather(crowd: Crowd, processes: int, seed: int) -> tuple[float, float]:
    """Seconds from the first start to the last agent's round, and from the last start. Raises SystemExit."""
    command = [sys.executable, str(Path(__file__))]
    parts = []
    for number in range(processes):
        part = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        parts.append(part)
        _tell(part, {**asdict(crowd), "mine": list(range(number, crowd.count, processes)), "seed": seed})
    try:
        for part in parts:
            _hear(part)
        began = time.monotonic() + 0.2
        for part in parts:
            _tell(part, began)
        joined = [Joined(one[0], one[1], *map(int, one[2:])) for part in parts for one in _hear(part)]
    finally:
        for part in parts:
            part.kill()
            part.wait()
    if {(j.round, j.world_size) for j in joined} != {(1, crowd.count)} or {j.rank for j in joined} != {
        *range(crowd.count)
    }:
        raise SystemExit(f"{crowd.count} agents did not agree: {len(joined)} of them have a round")
    last = max(j.ended for j in joined)
    return last - min(j.asked for j in joined), last - max(j.asked for j in joined)


def at_operator(url: str, tokens: Sequence[str], processes: int, seed: int, ca: str = "") -> tuple[float, float]:
    """`gather` of as many agents as there are pods."""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(len(tokens))]
        for file, token in zip(files, tokens, strict=True):
            file.write_text(token)
        return gather(Crowd(url, tuple(map(str, files)), "", len(files), ca), processes, seed)


def _tell(part: subprocess.Popen[str], what: object) -> None:
    assert part.stdin is not None
    part.stdin.write(json.dumps(what) + "\n")
    part.stdin.flush()


def _hear(part: subprocess.Popen[str]) -> list[list[float]]:
    assert part.stdout is not None
    line = part.stdout.readline()
    if not line:
        raise SystemExit("a process of agents ended: see above")
    return list(json.loads(line))


def main() -> None:
    os.nice(10)  # agents are on other machines than what they meet at, and take no processor away from it
    sys.setswitchinterval(0.1)  # nor from each other: a hundred threads that wait would look up every 5 ms
    told = json.loads(sys.stdin.readline())
    mine, seed = told.pop("mine"), told.pop("seed")
    crowd = Crowd(**{**told, "token_files": tuple(told["token_files"])})
    sizes = Sizes(crowd.count, crowd.count)
    random = Random(seed * crowd.count + mine[0])
    starts = {i: random.uniform(0, 1) for i in mine}
    drivers = {
        i: Driver(
            crowd.store(i), Member(i, f"agent-{i:04}", address="10.0.0.1", store_port=29500), sizes, SETTINGS,
            random=Random(i),
        )
        for i in mine
    }  # fmt: skip
    joined: list[Joined] = []
    begin = threading.Event()

    def run(i: int) -> None:
        begin.wait()
        time.sleep(max(0.0, began + starts[i] - time.monotonic()))
        asked = time.monotonic()
        found = drivers[i].join(LIMIT)
        joined.append(Joined(asked, time.monotonic(), found.number, found.rank, found.world_size))

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in mine]
    for thread in threads:
        thread.start()
    print("[]", flush=True)
    began = float(json.loads(sys.stdin.readline()))
    begin.set()
    for thread in threads:
        thread.join(LIMIT + 5)
    print(json.dumps([list(asdict(one).values()) for one in joined]), flush=True)
    sys.stdin.read()  # the others may still be at it, and this one's watches are part of it
    os._exit(0)


if __name__ == "__main__":
    main()
