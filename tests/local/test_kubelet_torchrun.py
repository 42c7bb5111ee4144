"""Stock torchrun in the pods that the operator makes: they find each other without DNS, on a port that was taken."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from everstep_local.kubelet.sources import PODS
from everstep_operator.api.parse import parse_spec, parse_status
from everstep_operator.plan.render import pods
from everstep_operator.plan.snapshot import JobView, Settings

NS = "default"
TRAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", total.item(), "master", os.environ["MASTER_ADDR"], flush=True)
# Rank 1 ends first, and rank 0, whose process has the store, after it. After a barrier of gloo either may end while the
# other is still in it. torchrun would start that one again, and wait for minutes for a peer that is over.
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 0:
    store.set("reduced", "")
    store.wait(["over"])
else:
    store.wait(["reduced"])
    store.set("over", "")
"""
LIMIT = 200.0  # seconds: four processes import torch, on a machine that does much else


def job() -> JobView:
    worker = {"name": "worker", "image": "none", "workingDir": "/workspace", "command": ["torchrun", "train.py"]}
    spec = parse_spec({"replicas": 2, "template": {"spec": {"containers": [worker]}}})
    return JobView(NS, "digits", "uid", 1, "1", spec, parse_status({}), datetime.now(UTC))


@pytest.mark.long
@pytest.mark.timeout(LIMIT + 60)
async def test_two_pods_of_the_operator_all_reduce(machine: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # As another job's store would be; if somebody has it already, that is as good.
        with contextlib.suppress(OSError):
            taken.bind(("0.0.0.0", 29400))
            taken.listen()
        m = await machine(workdir=tmp_path)
        names = []
        for index in range(2):
            body = pods.worker_pod(job(), index, 1, 2, Settings(report_url="http://127.0.0.1:1"))
            del body["metadata"]["ownerReferences"]  # there is no such job to own it
            names.append(body["metadata"]["name"])
            await m.client.create(PODS, NS, body)
        try:
            await m.until("both have ended", lambda: _ended(m, names), seconds=LIMIT)
        except AssertionError as e:
            raise AssertionError(f"{e}: {[await m.log(name) for name in names]}") from e
        found = [await m.pod(name) for name in names]
        logs = [await m.log(name) for name in names]
    assert [pod.status["phase"] for pod in found] == ["Succeeded", "Succeeded"], logs
    assert {pod.spec["nodeName"] for pod in found} == {"node-1", "node-2"}
    master = found[0].status["podIP"]
    assert [[line for line in log if line.startswith("sum")] for log in logs] == [[f"sum 3.0 master {master}"]] * 2


async def _ended(m: Any, names: list[str]) -> bool:
    return {(await m.pod(name)).status.get("phase") for name in names} <= {"Succeeded", "Failed"}
