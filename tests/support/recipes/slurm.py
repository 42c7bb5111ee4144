"""A real Slurm on the loopback: munged, slurmctld, and two nodes of this machine, each with a slurmd of its own.

Everything that it keeps is in one folder, so that it meets no Slurm of the machine. Jobs run as whoever started it.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import everstep
from support.network.ports import Ports
from support.recipes.recipes import BIN, EXAMPLES, Ended, RecipeFailed
from testcluster import programs
from testcluster.daemon import Daemon
from testcluster.proc import CommandError, run, which

NODES = ("n0", "n1")
END = 40.0  # seconds until the jobs have ended
SECONDS = 200  # that a job may take, on a machine with other work
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
CONFIGURATION = """\
ClusterName=everstep
FirstJobId={first}
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """A job of examples/slurm/job.sbatch: its number, and the folder of its commits and its output."""

    number: str
    folder: Path

    def output(self) -> str:
        file = self.folder / "output"
        return file.read_text() if file.exists() else ""


class Slurm:
    def __init__(self, folder: Path) -> None:
        self._folder, self._ports = folder, Ports()
        self._environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        user = pwd.getpwuid(os.getuid()).pw_name
        # The number of a job makes the port of its etcd, and another Slurm may run beside this one.
        lines = [CONFIGURATION.format(first=os.getpid() % 9000 + 1, user=user, port=self._ports.take(), folder=folder)]
        lines += [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={self._ports.take()} CPUs=4\n"
            for node in NODES
        ]
        (folder / "slurm.conf").write_text("".join(lines))
        socket = folder / "munge.socket"
        munged = [
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}",
            f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed", f"--log-file={folder}/munged.log",
        ]  # fmt: skip
        self._daemons = [
            self._daemon("munged", munged, socket.exists),
            self._daemon("slurmctld", ["slurmctld", "-D", "-i"], lambda: "UP" in self._ask("scontrol", "ping")),
            *(self._daemon(node, ["slurmd", "-D", "-N", node], partial(self._idle, node)) for node in NODES),
        ]

    def start(self) -> None:
        for daemon in self._daemons:
            daemon.start()

    def stop(self) -> None:
        """Ends all jobs, whose processes would outlive the daemons, and then the daemons."""
        user = f"--user={pwd.getpwuid(os.getuid()).pw_name}"
        deadline = time.monotonic() + END
        while self._ask("squeue", "--noheader", "--format=%i") and time.monotonic() < deadline:
            self._ask("scancel", "--full", "--signal=KILL", user)
            self._ask("scancel", user)
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.stop()
        self._ports.close()

    def submit(self, folder: Path, command: Sequence[str], *options: str) -> Batch:
        """Hands in examples/slurm/job.sbatch with `command` and sbatch's `options`, as a user would in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        variables = {
            "PATH": f"{BIN}:{programs.server('etcd').parent}:{os.environ['PATH']}",
            "ADDRESS": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "EVERSTEP_CHECKPOINT_URL": str(folder / "commits"),
        }
        number = run(
            "sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/output", *options,
            str(EXAMPLES / "slurm" / "job.sbatch"), *command, env={**self._environ, **variables},
        )  # fmt: skip
        return Batch(number.strip(), folder)

    def until(self, job: Batch, *states: str) -> None:
        """Waits until a job is in one of these states. Raises RecipeFailed with the end of its output if it ends in
        another one, or takes too long."""
        deadline = time.monotonic() + SECONDS
        while (state := self.state(job)) not in states:
            if state in OVER or time.monotonic() > deadline:
                raise RecipeFailed(f"the job is {state}, not {' or '.join(states)}:\n{job.output()[-6000:]}")
            time.sleep(0.1)

    def state(self, job: Batch) -> str:
        return self._ask("squeue", "--noheader", "--states=all", f"--jobs={job.number}", "--format=%T").strip()

    def at_once(self, job: Batch) -> None:
        """Waits until a job is in the queue again, and starts it. Slurm would let it wait for two minutes."""
        deadline = time.monotonic() + SECONDS
        while True:
            again, state = "Restarts=1" in self._ask("scontrol", "show", "job", job.number), self.state(job)
            if again and state in {"RUNNING", "COMPLETED"}:
                return
            if state in OVER or time.monotonic() > deadline:
                raise RecipeFailed(f"the job is {state}, and not started again:\n{job.output()[-6000:]}")
            # Again and again: when its first run has ended, Slurm lets the job wait for two minutes from then.
            self._ask("scontrol", "update", f"JobId={job.number}", "StartTime=now")
            time.sleep(0.5)

    def ended(self, job: Batch) -> Ended:
        """What a job has made, when it is over and has succeeded."""
        self.until(job, "COMPLETED")
        loaded = everstep.load(job.folder / "commits")
        return Ended(loaded.step, loaded.state, job.output(), job.folder)

    def _daemon(self, name: str, argv: list[str], answers: Callable[[], bool]) -> Daemon:
        program, *rest = argv
        return Daemon([which(program) or program, *rest], self._folder / f"{name}.log", answers, self._environ)

    def _idle(self, node: str) -> bool:
        return "State=IDLE" in self._ask("scontrol", "show", "node", node)

    def _ask(self, *argv: str) -> str:
        try:
            return run(*argv, env=self._environ)
        except CommandError:
            return ""
