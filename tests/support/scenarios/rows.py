"""The rows of `tables/restarted_as_a_whole.txt`: what starts the job, what takes it, and whether it had committed.

`make nightly` plays all rows on the cluster and locally.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Template

from support import TESTS

TEXT = TESTS / "scenarios" / "tables" / "restarted_as_a_whole.txt"
NEVER = 100_000  # steps between commits of a job that makes none before its fault
OFTEN = 10
# Steps that a job may take until its next loss: kubectl on a busy machine needs ten seconds, and the job mostly trains.
ON_A_CLUSTER, HERE = 110, 40
LOSSES = 5  # processes that are killed before the fault, one after the other, each when the job trains again

FAULTS = {
    "all-pods": "delete-pod all\nuntil lost",
    "suspended-twice": "\n".join(
        [
            *("suspend", "until no-pods", "$kept", "resume", "until training"),
            *("suspend", "until no-pods", "$kept", "resume"),
        ]
    ),
    "node-of-all": "kill-node-of 0\nuntil training\nstart-nodes",
    "operator-and-all": "kill-operator\nkill-torchrun all",
}


@dataclass(frozen=True, slots=True)
class Launcher:
    """How a job is started. `restarts`: PET_MAX_RESTARTS in its template, if any: torchrun counts the loss of a peer
    too, and by what the operator sets would end the pod at the fourth, under c10d at the first."""

    script: str
    command: str
    backend: str
    restarts: int | None = None


LAUNCHERS = {
    "session": Launcher("ledger", "everstep-run", "everstep"),
    "plain": Launcher("digits", "everstep-run", "everstep"),
    "torchrun-everstep": Launcher("ledger", "torchrun", "everstep", restarts=20),
    "torchrun-etcd": Launcher("ledger", "torchrun", "etcd", restarts=20),
    "torchrun-c10d": Launcher("ledger", "torchrun", "c10d", restarts=20),
}


@dataclass(frozen=True, slots=True)
class Row:
    launcher: str
    fault: str
    committed: bool

    def __str__(self) -> str:
        return f"{self.launcher}-{self.fault}-{'committed' if self.committed else 'uncommitted'}"

    def text(self, steps_per_loss: int = ON_A_CLUSTER) -> str:
        how = LAUNCHERS[self.launcher]
        return Template(TEXT.read_text()).substitute(
            launcher=how.command,
            script=how.script,
            backend=how.backend,
            restarts="" if how.restarts is None else f"restarts={how.restarts}",
            every=OFTEN if self.committed else NEVER,
            losses=LOSSES,
            steps=160 + steps_per_loss * LOSSES,
            together="yes" if self.fault == "node-of-all" else "no",
            # What the session promises; a script that saves by itself goes on from its last commit.
            fault=Template(FAULTS[self.fault]).substitute(kept="expect kept" if how.script == "ledger" else ""),
        )


ROWS = [Row(launcher, fault, committed) for launcher in LAUNCHERS for fault in FAULTS for committed in (True, False)]
