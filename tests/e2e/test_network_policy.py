"""The policies of jobs and of the chart before a network that enforces them: who reaches whom."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.e2e.driver import SYSTEM, Job
from support.e2e.firewall import firewall
from support.scenarios.player import wait_for
from testcluster import project

OWN, DECLARED = 5000, 6006  # a port that no policy names, and one of the job's template
OPERATOR, PROBES = 8080, 8081
STRANGER = "stranger"
ENFORCED = 60  # seconds until the nodes have the rules
LISTEN = f"""
import socket, threading
def serve(port):
    server = socket.create_server(("", port), backlog=64)
    while True:
        server.accept()[0].close()
threading.Thread(target=serve, args=({DECLARED},), daemon=True).start()
serve({OWN})
"""
# Who is refused learns it at once or never.
CONNECT = """
import json, socket, sys
def reached(host, port):
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        return False
    return True
print(json.dumps([reached(*one) for one in json.loads(sys.argv[1])]))
"""


def listening(job: Job, replicas: int) -> dict[str, Any]:
    """Its workers train nothing: they listen on both ports."""
    manifest = job.elastic(steps=1, pause=0.0)
    spec = manifest["spec"]
    del spec["elastic"]
    spec["replicas"] = replicas
    worker = spec["template"]["spec"]["containers"][0]
    worker |= {"command": ["python3", "-c", LISTEN], "ports": [{"containerPort": DECLARED}]}
    return manifest


def stranger(job: Job) -> None:
    """A pod of the namespace that is no worker. It listens as workers do."""
    container = {
        "name": "worker",
        "image": project.DIGITS,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", LISTEN],
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": STRANGER}, "spec": spec}
    job.kubectl("apply", "-f", "-", input=json.dumps(pod))


def addresses(job: Job, *selector: str) -> dict[str, str]:
    """By pod, of those that run."""
    got = json.loads(job.kubectl("get", "pods", *selector, "-o", "json"))["items"]
    found = {pod["metadata"]["name"]: str(pod["status"].get("podIP", "")) for pod in got}
    return found if all(found.values()) else {}


def reached(job: Job, pod: str, *wanted: tuple[str, int]) -> list[bool]:
    """Which of these addresses and ports the pod can connect to."""
    done = job.kubectl("exec", pod, "-c", "worker", "--", "python3", "-c", CONNECT, json.dumps(wanted))
    answer: list[bool] = json.loads(done)
    return answer


@pytest.mark.kind
@pytest.mark.alone  # the policies of every job are enforced while it runs
@pytest.mark.long  # a minute or three, and the build of kube-router
def test_network_that_enforces_policies_lets_a_jobs_own_workers_reach_each_other_and_nobody_else(
    new_job: Callable[..., Job], kube_router_image: str
) -> None:
    del kube_router_image  # on the nodes
    one = new_job("one")
    other = new_job("other", one.namespace)
    one.submit(listening(one, 2))
    other.submit(listening(other, 1))
    stranger(one)
    pods = wait_for("every pod has an address", lambda: len(found := addresses(one)) == 4 and found, 120)
    assert pods
    first, second, third, outside = (pods[n] for n in ("one-w0-0", "one-w1-0", "other-w0-0", STRANGER))
    operator = json.loads(
        one.cluster.kubectl("-n", SYSTEM, "get", "pod", one.leader(), "-o", "jsonpath={.status}").stdout
    )["podIP"]
    everything = [(host, port) for host in (first, second, third, outside) for port in (OWN, DECLARED)]
    everything += [(operator, OPERATOR), (operator, PROBES)]

    def all_reached() -> bool:
        return all(reached(one, STRANGER, *everything))

    # The network enforces nothing yet. So all of it listens, and what is refused later is refused by a policy.
    wait_for("the stranger reaches everything", all_reached, 60)
    with firewall(one.cluster):
        wait_for(
            "the stranger reaches no worker's own port",
            lambda: reached(one, STRANGER, (first, OWN), (second, OWN), (third, OWN)) == [False] * 3,
            ENFORCED,
        )
        wait_for(
            "the stranger does not reach the operator",
            lambda: reached(one, STRANGER, (operator, OPERATOR)) == [False],
            ENFORCED,
        )
        # Declared ports are everybody's, and so are the operator's probes; a pod without a policy is reached as ever.
        open_to_all = [(host, DECLARED) for host in (first, second, third)] + [(operator, PROBES)]
        assert reached(one, STRANGER, *open_to_all) == [True] * 4
        assert reached(one, "one-w0-0", (second, OWN), (second, DECLARED)) == [True, True]
        assert reached(one, "one-w1-0", (first, OWN), (first, DECLARED)) == [True, True]
        for worker in ("one-w0-0", "one-w1-0"):
            assert reached(one, worker, (third, OWN), (third, DECLARED)) == [False, True]
            assert reached(one, worker, (outside, OWN), (operator, OPERATOR)) == [True, True]
        assert reached(one, "other-w0-0", (first, OWN), (second, OWN)) == [False, False]
        assert reached(one, "other-w0-0", (first, DECLARED), (operator, OPERATOR)) == [True, True]
        # Ports that the system chooses, the rendezvous and the operator: a job that trains needs them all.
        trained = new_job("trained", one.namespace)
        trained.apply(workers=2, steps=200, pause=0.02, every=50)
        trained.until_complete()
        trained.expect_undisturbed()
    wait_for("the stranger reaches everything again", all_reached, 60)
