"""Jobs in local mode, as a user has them: `everstep run` in one terminal, the other commands in a second."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from everstep.checkpoint import Catalog
from everstep.storage import open_store
from everstep_local.run.control import ControlError, RunAddress, ask
from support.processes.descriptors import opened
from support.scenarios.player import BUSY, SECONDS, TOGETHER, Player, wait_for
from support.scenarios.reference import ScenarioError
from support.scenarios.training_processes import children_of, command_of, trainers
from testcluster.s3 import S3Server

NODES = 2
BUCKET = "everstep"
LOOK = 2.0  # seconds from one look at the run's ports to the next


class LocalJob(Player):
    """One run below `folder`, which it has to itself; commits go to a folder there, or to `store`."""

    def __init__(
        self, folder: Path, store: S3Server | None = None, name: str = "digits", etcd: str | None = None
    ) -> None:
        self.folder, self.store, self.name, self.rendezvous = folder, store, name, etcd
        folder.mkdir(parents=True)
        # Not below `folder`: a socket's path has a limit, and names of tests are long.
        self.temporary = Path(tempfile.mkdtemp(prefix="everstep-run-"))
        self.out = folder / "out"
        self.process: subprocess.Popen[bytes] | None = None
        self.killed_nodes: list[str] = []
        self.stopped: list[int] = []  # processes of nodes that are paused
        self._last: dict[str, Any] = {}
        self.listening: set[str] = set()  # inodes of the sockets that the run was seen to listen on
        self._looked = 0.0
        self._prefix = secrets.token_hex(4)

    # Where it runs.

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self._prefix}" if self.store else f"file://{self.folder}/commits"

    def storage_environment(self) -> Mapping[str, str]:
        return self.store.account.env if self.store else {}

    def script_path(self, script: Path) -> str:
        shutil.copy(script, self.folder)  # the workers run there
        return script.name

    def etcd(self) -> str:
        assert self.rendezvous is not None, "this test has no etcd"
        return self.rendezvous

    def submit_together(self, manifest: dict[str, Any]) -> None:
        """Workers that were put on another node than the first die with it, and come back on the first."""
        self.submit(manifest)
        stays, *others = self.node_names()
        wait_for("the run", lambda: self.view().get("workers"), 30)
        for node in others:
            self.ask("kill-node", node=node)

        def together() -> bool:
            rows = [row for row in self.view()["workers"] if row["pid"]]
            return {row["worker"] for row in rows if row["node"] == stays} == set(range(self.workers))

        wait_for(f"all workers on {stays}", together, TOGETHER)
        for node in others:
            self.ask("start-node", node=node)

    def submit(self, manifest: dict[str, Any]) -> None:
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(manifest))
        options = ["--nodes", str(NODES), "--out", str(self.out), "--plain"]
        if self.store:
            self.store.account.bucket(BUCKET)
            secret = self.folder / "secret.env"
            secret.write_text("".join(f"{k}={v}\n" for k, v in self.store.account.env.items()))
            options += ["--secret", f"s3-credentials={secret}"]
        else:
            options += ["--checkpoint", self.url]
        self.start(str(path), *options)

    def start(self, *arguments: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
        with (self.folder / "printed.txt").open("wb") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "everstep.cli.main", "run", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env={**environment, "TMPDIR": str(self.temporary)},
            )

    def ask(self, verb: str, **arguments: Any) -> list[dict[str, Any]]:
        assert self.process is not None
        socket = self.temporary / f"everstep-{os.getuid()}" / f"{self.process.pid}-{self.name}.sock"
        return list(ask(RunAddress(self.name, self.process.pid, socket), verb, **arguments))

    def view(self) -> dict[str, Any]:
        """What `everstep status -o json` says; after the end what the run left."""
        if time.monotonic() - self._looked > LOOK:
            self._looked = time.monotonic()
            self.listening |= {inode for pid in self.processes() for inode in sockets_of(pid)} & listening()
        try:
            for answer in self.ask("status"):  # a run that ends just now gives none
                self._last = answer["view"]
        except ControlError:
            if self.process is not None and (code := self.process.poll()) is not None:
                left = self.out / "status.json"
                if not left.exists():
                    raise ScenarioError(f"the run ended with exit code {code}\n{self.describe()}") from None
                self._last = json.loads(left.read_text())
        return self._last

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = {"world": {}, "checkpoint": {}, **self.view().get("raw_status", {})}
        return status

    def reached(self, field_: str) -> int:
        """The status tells it every five seconds, in which a short run can end: here it is seen at once."""
        match field_:
            case "progress.step":
                return max((row["step"] or 0 for row in self.view().get("workers", ())), default=-1)
            case "checkpoint.lastCommittedStep" if self.store is None:
                self.view()  # raises if the run has ended badly
                newest = Catalog(open_store(self.url)).latest()
                return -1 if newest is None else newest.step
        return super().reached(field_)

    def worker(self, index: int) -> dict[str, Any]:
        rows = [row for row in self.view().get("workers", ()) if row["worker"] == index]
        if not rows:
            raise ScenarioError(f"worker {index} has no pod\n{self.describe()}")
        newest: dict[str, Any] = max(rows, key=lambda row: row["incarnation"])
        return newest

    # What a user does.

    def _tell(self, verb: str, **arguments: Any) -> None:
        self.inject(lambda: self._told(verb, **arguments))

    def _told(self, verb: str, **arguments: Any) -> None:
        try:
            self.ask(verb, **arguments)
        except ControlError as e:
            raise ScenarioError(f"{verb} {arguments}: {e}") from e

    def delete_pods(self, indices: list[int]) -> None:
        pods = [self.worker(index)["pod"] for index in indices]

        def fault() -> None:
            for pod in pods:
                self._told("delete", pod=pod)

        self.inject(fault)

    def kill_torchrun(self, index: int) -> None:
        self._tell("kill", pod=self.worker(index)["pod"])

    def kill_process(self, index: int) -> None:
        launcher = self.worker(index)["pid"]
        training = trainers(launcher) if launcher else []
        if not training:
            raise ScenarioError(f"worker {index}: launcher {launcher} has no training process\n{self.describe()}")

        def fault() -> None:
            for pid in training:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)

        self.inject(fault)

    def kill_node(self, name: str) -> None:
        self.killed_nodes.append(name)
        self._tell("kill-node", node=name)

    def pause_node(self, name: str) -> None:
        """Here a node is its pods' processes: what watches them is not paused with them."""
        launchers = [row["pid"] for row in self.view().get("workers", ()) if row["node"] == name and row["pid"]]
        for pid in [p for launcher in launchers for p in (launcher, *reversed(descendants(launcher)))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self.stopped.append(pid)

    def drain_node(self, name: str) -> None:
        """Nodes here cannot be told to take no pods."""
        self.delete_pods([row["worker"] for row in self.view().get("workers", ()) if row["node"] == name])

    def start_nodes(self) -> None:
        for pid in reversed(self.stopped):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()
        for node in self.killed_nodes:
            with contextlib.suppress(ControlError):  # the job has ended, and its nodes with it
                self.ask("start-node", node=node)
        self.killed_nodes.clear()

    def kill_operator(self) -> None:
        self._told("kill-operator")

    def restart_store(self) -> None:
        assert self.store is not None
        self.store.kill()
        time.sleep(0.5)  # it is away for a moment, as a pod is that starts anew
        self.store.start()

    def scale(self, replicas: int) -> None:
        self.workers = replicas
        self._tell("scale", replicas=replicas)

    def suspend(self, wanted: bool) -> None:
        self._tell("suspend", wanted=wanted)

    # What a user sees.

    def node_of(self, index: int) -> str:
        return str(self.worker(index)["node"])

    def indices(self) -> list[int]:
        return sorted({row["worker"] for row in self.view().get("workers", ())})

    def expect_ended(self) -> None:
        if left := [f"process {pid}: {command_of(pid)!r}" for pid in self.processes()]:
            raise ScenarioError("\n".join(["these processes are left of a run that has ended:", *left]))

    def pod_names(self) -> list[str]:
        return [self.worker(index)["pod"] for index in self.indices()]

    def nodes_of_pods(self) -> list[str]:
        return [row["node"] for row in self.view().get("workers", ())]

    def node_names(self) -> list[str]:
        return [f"node-{i + 1}" for i in range(NODES)]

    def logs(self) -> dict[str, str]:
        return {
            path.stem: "\n".join(line.partition(" ")[2] for line in path.read_text().splitlines())
            for path in sorted((self.out / "logs").glob("*.log"))
        }

    def exit_code(self, seconds: float = 240) -> int:
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ScenarioError(f"not over within {seconds} s\n{self.describe()}") from None

    def until_complete(self, seconds: float = SECONDS) -> None:
        if (code := self.exit_code(BUSY * seconds)) != 0:
            raise ScenarioError(f"everstep run ended with exit code {code}\n{self.describe()}")

    def describe(self) -> str:
        printed = (self.folder / "printed.txt").read_text()[-4000:]
        operator = self.out / "operator.log"
        said = operator.read_text()[-3000:] if operator.exists() else ""
        logs = [f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted((self.out / "logs").glob("*.log"))[-4:]]
        return "\n".join([printed, "--- operator", said, *logs])

    def remove(self) -> None:
        """Stop the run if it still goes on."""
        self.start_nodes()  # what stands still does not end
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)

    def left(self) -> list[str]:
        """What the run left behind that it should not have: processes, ports, sockets and temporary files."""
        found = [str(p) for p in self.temporary.rglob("*") if not p.is_dir()]
        found += [str(p) for p in self.temporary.glob("*") if p.name != f"everstep-{os.getuid()}"]
        found += [f"process {pid}: {command_of(pid)!r}" for pid in self.processes()]
        found += [f"listening socket, inode {inode}" for inode in self.listening & listening()]
        return found

    def processes(self) -> list[int]:
        """Every living process of the run, known by its environment."""
        mark = str(self.temporary).encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def expect_nothing_left(self) -> None:
        """Whoever was killed last may need a moment to be gone."""
        try:
            wait_for("nothing is left", lambda: not self.left(), 10)
        except ScenarioError:
            raise ScenarioError(f"left of the run: {self.left()}\n{self.describe()}") from None
        shutil.rmtree(self.temporary)


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    with contextlib.suppress(OSError):
        return {name[len("socket:[") : -1] for name in opened(pid).values() if name.startswith("socket:[")}
    return set()


def listening() -> set[str]:
    """Inodes of this machine's listening TCP sockets."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {row[9] for row in rows if row[3] == "0A"}


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, children first."""
    children = children_of()
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        found += level
    return found
