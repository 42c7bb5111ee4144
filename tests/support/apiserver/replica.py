"""The operator as the process that a Deployment runs, before a real API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import ROOT
from testcluster.daemon import free_ports

LEASE_SECONDS = 3
IN_POD = ROOT / "tests/support/operator/in_pod.py"


class Replica:
    """One `everstep-operator`, with the variables that the chart sets."""

    def __init__(
        self,
        plane: Any,
        namespace: str,
        name: str,
        folder: Path,
        lease_seconds: int = LEASE_SECONDS,
        *,
        in_pod: bool = False,
        environ: Mapping[str, str] = {},
    ) -> None:
        """`in_pod`: with a service account's files in place of the kubeconfig; its modules are printed at its end.
        `environ`: more variables."""
        self.port, self.probe_port = free_ports(2)
        self.name, self.log, self.printed = name, folder / f"{name}.log", folder / f"{name}.out"
        environ = {
            **os.environ, **environ, "EVERSTEP_NAMESPACE": namespace, "EVERSTEP_POD_NAME": name,
            "EVERSTEP_PORT": str(self.port), "EVERSTEP_PROBE_PORT": str(self.probe_port),
            "EVERSTEP_LEASE_SECONDS": str(lease_seconds),
        }  # fmt: skip
        command = [str(Path(sys.executable).with_name("everstep-operator")), "--kubeconfig", str(plane.kubeconfig)]
        if in_pod:
            account = folder / f"{name}-account"
            account.mkdir()
            (account / "token").write_text(plane.token)
            (account / "ca.crt").write_bytes(plane.ca_file.read_bytes())
            host, port = plane.url.removeprefix("https://").split(":")
            environ |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
            environ.pop("KUBECONFIG", None)
            command = [sys.executable, "-P", str(IN_POD), str(account)]
        with self.log.open("wb") as log, self.printed.open("wb") as printed:
            self.process = subprocess.Popen(command, env=environ, stdout=printed, stderr=log)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
        self.process.wait(10)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.probe_port}{path}", timeout=5) as reply:
            return str(reply.read().decode())

    async def is_ready(self) -> bool:
        try:
            await asyncio.to_thread(self.get, "/readyz")
        except OSError:
            assert self.process.poll() is None, self.log.read_text()
            return False
        return True

    async def leads(self) -> bool:
        return "everstep_leader 1.0" in await asyncio.to_thread(self.get, "/metrics")

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged; a line may not be whole yet."""
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
