"""What agents meet through: real etcd, one member or three, and the operator's round store over HTTP. Each can die."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import torchft_peer

from everstep.contract import env
from everstep.contract.messages import REPORT_PATH
from support.rendezvous.etcd_server import EtcdCluster
from support.rendezvous.operator_server import OperatorServer
from testcluster.daemon import free_ports


class Store(Protocol):
    endpoint: str

    def new_job(self) -> str:
        """The id of a job that nobody has met in."""

    def variables(self, job: str, agent: int) -> dict[str, str]:
        """What an agent of the job has in its environment."""

    def down(self) -> None:
        """What the agents talk to is killed."""

    def back(self) -> float:
        """It serves again; since when."""

    def stop(self) -> None:
        """For good."""


class Etcd:
    """`down` takes the first member away, which is the one that agents talk to."""

    def __init__(self, members: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="everstep-recovery-etcd-"))
        self._cluster = EtcdCluster(self._folder, members)
        self._cluster.start()
        self.endpoint = ",".join(url.removeprefix("http://") for url in self._cluster.urls)

    def new_job(self) -> str:
        return uuid.uuid4().hex

    def variables(self, job: str, agent: int) -> dict[str, str]:
        return {}

    def down(self) -> None:
        self._cluster.members[0].kill()

    def back(self) -> float:
        self._cluster.members[0].start()
        return time.monotonic()

    def stop(self) -> None:
        self._cluster.stop()
        shutil.rmtree(self._folder)


class OperatorStore:
    """One replica, on an API server in memory; `down` kills it, and the next has its port."""

    endpoint = ""  # it is in the environment

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="everstep-recovery-operator-"))
        self._server = OperatorServer(self._folder)
        self._replica = self._server.start()
        self._port = self._replica.port

    def new_job(self) -> str:
        self._job = self._server.create_job(f"job-{uuid.uuid4().hex[:8]}")
        return self._job.metadata.uid

    def variables(self, job: str, agent: int) -> dict[str, str]:
        pod = self._server.create_pod(self._job, agent)
        return {
            env.JOB_UID: job,
            env.REPORT_URL: self._replica.url + REPORT_PATH,
            env.TOKEN_FILE: str(pod.token_file),
            env.WORKER_INDEX: str(pod.index),
            env.INCARNATION: "0",
        }

    def down(self) -> None:
        self._server.kill(self._replica)

    def back(self) -> float:
        self._replica = self._server.start(self._port)
        while not self._server.leads(self._replica):
            time.sleep(0.002)
        return time.monotonic()

    def stop(self) -> None:
        self._server.stop()
        shutil.rmtree(self._folder)


class Lighthouse:
    """torchft's, with a heartbeat that counts as lost after `lost_after` seconds."""

    def __init__(self, lost_after: float, distribution: str = torchft_peer.NIGHTLY) -> None:
        (port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{port}"
        program = torchft_peer.interpreter(distribution).with_name("torchft_lighthouse")
        self._process = subprocess.Popen(
            [
                str(program), "--bind", f"127.0.0.1:{port}",
                "--min_replicas", "2", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000",  # as its example does
                "--heartbeat_timeout_ms", str(int(lost_after * 1000)),
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def new_job(self) -> str:
        return uuid.uuid4().hex

    def variables(self, job: str, agent: int) -> dict[str, str]:
        return {"TORCHFT_LIGHTHOUSE": self.endpoint, "REPLICA_GROUP_ID": str(agent)}

    def down(self) -> None:
        raise NotImplementedError("nothing measures the lighthouse's death")

    def back(self) -> float:
        raise NotImplementedError("nothing measures the lighthouse's death")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


STORES: Final[dict[str, Callable[[], Store]]] = {
    "etcd": lambda: Etcd(1),
    "etcd3": lambda: Etcd(3),
    "operator": OperatorStore,
    "lighthouse": lambda: Lighthouse(5.0),  # its default
    "lighthouse_1s": lambda: Lighthouse(1.0),
    "lighthouse_release": lambda: Lighthouse(5.0, torchft_peer.RELEASE),
}
