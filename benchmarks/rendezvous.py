"""How long agents need to agree on a round: a thousand at once, and a few that lose one of them.

    python benchmarks/rendezvous.py [--quick] [--json PATH]

The agents are threads over the memory store, with the driver, the participant and the document as they ship, on one
Python interpreter: decoding is shared (each document once for all of them), everything else is done a thousand times
by the same cores. There is no network; `tests/rendezvous` has real etcd. Starts are spread over a second.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))
from figures import Better, Figure, finish, parser, quantile

from everstep.contract.document import Member, Sizes
from everstep.rendezvous.driver import Driver
from everstep.rendezvous.joining import Settings
from everstep.rendezvous.memory import MemoryStore
from everstep.rendezvous.participant import Broken, Patience, Round

MANY = 1000
LIMIT = 120.0
SETTINGS = Settings(patience=Patience(last_call=2.0, rejoin=30.0), ttl=30.0)


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


def main() -> int:
    arguments = parser(__doc__).parse_args()
    turns = 1 if arguments.quick else 5
    lost = lose_one(3, 20 if arguments.quick else 200)
    crowds = [crowd(MANY, seed) for seed in range(turns)]
    lower = Better.LOWER
    figures = [
        Figure(f"join.{MANY}_agents.whole.max", max(c[0] for c in crowds), "s", lower, turns, goal=5),
        Figure(f"join.{MANY}_agents.after_last_start.max", max(c[1] for c in crowds), "s", lower, turns),
        Figure(f"join.{MANY}_agents.writes.max", float(max(c[2] for c in crowds)), "1", lower, turns),
        Figure("lose_one_of_3.p50", quantile(lost, 0.5), "ms", lower, len(lost)),
        Figure("lose_one_of_3.p99", quantile(lost, 0.99), "ms", lower, len(lost)),
    ]
    return finish(figures, arguments)


if __name__ == "__main__":
    sys.exit(main())
