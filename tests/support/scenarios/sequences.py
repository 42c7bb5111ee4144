"""Random sequences of what users and machines do to a job, as scenario texts.

Pure: a seed and a place give a text. Invariants: a job is resumed only if it is suspended and suspended only if it is
not; at least one node takes pods at any time; at the end the job is not suspended, no quota is left and every node is
back; a size is one that the job may have. `tests/unit/test_sequences.py` holds it to them with a reader of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED_LINE = "# seed "  # the first line of a text begins with it
MOST = 4  # workers
EVENTS = (3, 6)
PAUSE = 0.04  # seconds a step
SLOW = 15.0  # seconds that a drain may take, or a node that comes and goes until a cluster calls it ready
STEPS = 120  # that are left over for the recoveries, whatever the moments take
EACH_TIME = (21, 48, 56)  # the seeds that `make nightly` plays locally: together they have every event
EVERY = (8, 40, 100_000)  # steps between commits; the last: none but those of a stop and of the end


@dataclass(frozen=True, slots=True)
class Place:
    """Where a text is played: nodes that take workers, whether its store can be restarted, and whether a quota can be
    set."""

    nodes: int
    store: bool
    quota: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """A job. `elastic`: its sizes are 1 to `MOST`. `resizes`: how many workers are wanted may be changed. `spares`:
    workers that wait for a lost one's place."""

    script: str
    launcher: str
    backend: str
    elastic: bool
    resizes: bool = True
    spares: int = 0


KINDS = (
    Kind("ledger", "everstep-run", "everstep", elastic=True),
    Kind("ledger", "everstep-run", "everstep", elastic=False),
    Kind("digits", "everstep-run", "everstep", elastic=True),
    Kind("ledger", "torchrun", "everstep", elastic=True),
    Kind("ledger", "torchrun", "c10d", elastic=False),
    Kind("ledger", "everstep-run", "everstep", elastic=True),
    Kind("ledger", "everstep-run", "everstep", elastic=False, resizes=False),
    Kind("digits", "everstep-run", "everstep", elastic=False),
    Kind("ledger", "torchrun", "etcd", elastic=True),
    Kind("ledger", "everstep-run", "etcd", elastic=True),
    Kind("ledger", "everstep-run", "everstep", elastic=True, spares=1),
)


class _State:
    """What a job is in while its text is written."""

    def __init__(self, rng: random.Random, kind: Kind, place: Place) -> None:
        self.rng, self.kind, self.place = rng, kind, place
        self.workers = rng.randint(2, 3)
        self.suspended = False
        self.away: str = ""  # what was done to the one node that is not there
        self.limited = False  # whether a quota allows few pods
        self.steps = STEPS

    def choices(self) -> dict[str, int]:
        """What may come next, and how often."""
        found = {"kill-operator": 2}
        if self.place.store:
            found["restart-store"] = 2
        if self.kind.resizes:
            found["scale"] = 3
        if self.away:
            found["start-nodes"] = 6
        elif self.place.nodes > 1:
            found |= {"kill-node": 2, "pause-node": 2, "drain-node": 2, "flap-node": 2}
        if self.place.quota:
            found |= {"no-quota": 6} if self.limited else {"quota": 2}
        if self.suspended:
            return found | {"resume": 6}
        return found | {"suspend": 3, "delete one": 2, "delete some": 2, "delete all": 3, "kill-process": 3}

    def take(self, what: str) -> str:
        """The line, and what the job is in after it."""
        rng = self.rng
        match what:
            case "delete one":
                return f"maybe delete-pod {rng.randrange(self.workers)}"
            case "delete some":
                some = rng.sample(range(self.workers), rng.randint(1, max(1, self.workers - 1)))
                return "maybe delete-pod " + " ".join(map(str, sorted(some)))
            case "delete all":
                return "maybe delete-pod all"
            case "kill-process":
                return f"maybe kill-process {rng.randrange(self.workers)}"
            case "scale":
                self.workers = rng.choice([n for n in range(1, MOST + 1) if n != self.workers])
                return f"scale {self.workers}"
            case "suspend" | "resume":
                self.suspended = what == "suspend"
                return what
            case "kill-node" | "pause-node" | "drain-node":
                self.steps += int(SLOW / PAUSE) if what == "drain-node" else 0
                self.away = what
                return f"{what} {rng.randint(1, self.place.nodes)}"
            case "flap-node":
                self.steps += int(SLOW / PAUSE)
                return f"{what} {rng.randint(1, self.place.nodes)}"
            case "start-nodes":
                self.away = ""
                return what
            case "quota":
                self.limited = True
                return f"{what} {rng.randint(1, MOST)}"
            case "no-quota":
                self.limited = False
                return what
            case _:
                return f"maybe {what}"

    def moment(self) -> str:
        """When the next thing comes: after so many seconds, or so many steps of a job that can take them."""
        # Nobody replaces at once what stands still, and torchrun waits for it.
        stands = self.suspended or self.limited or self.away == "pause-node"
        if stands or self.rng.random() < 0.6:
            seconds = round(self.rng.choice((0.0, 0.3, 1.0, 4.0)) * self.rng.uniform(0.5, 1.5), 2)
            self.steps += int(seconds / PAUSE)
            return f"wait {seconds}"
        further = self.rng.randint(3, 40)
        self.steps += further
        return f"maybe until further {further}"


def sequence(seed: int, place: Place, kinds: tuple[Kind, ...] = KINDS) -> str:
    """The text of this seed. Kinds of jobs come in turn, so that few seeds have many of them."""
    rng = random.Random(f"{seed} {place}")
    kind = kinds[seed % len(kinds)]
    state = _State(rng, kind, place)
    workers, lines = state.workers, []
    for _ in range(rng.randint(*EVENTS)):
        choices = state.choices()
        what = rng.choices(list(choices), list(choices.values()))[0]
        lines += [state.moment(), state.take(what)]
    lines += [f"wait {rng.uniform(0.5, 3):.2f}"] if state.away or state.suspended or state.limited else []
    lines += ["start-nodes"] if state.away else []
    lines += ["no-quota"] if state.limited else []
    lines += ["resume"] if state.suspended else []
    job = (
        f"job workers={workers} steps={state.steps} pause={PAUSE} every={rng.choice(EVERY)} script={kind.script}"
        f" launcher={kind.launcher} backend={kind.backend}"
        + (f" sizes=1:{MOST}" if kind.elastic else "")
        + (f" spares={kind.spares}" if kind.spares else "")
    )
    return "\n".join([f"{SEED_LINE}{seed}", job, "until step 5", *lines, "until complete", "expect outcome"]) + "\n"
