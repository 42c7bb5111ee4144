"""What of a pod the planner is told."""

from __future__ import annotations

import msgspec

from everstep.contract import labels
from everstep_operator.controller.observe import worker_pod
from everstep_operator.kube.wire import Pod


def test_evicted_pod_is_told_with_the_words_of_the_kubelet() -> None:
    found = {labels.WORKER_INDEX: "1", labels.INCARNATION: "2"}
    status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    pod = msgspec.convert({"metadata": {"name": "digits-w1-2", "uid": "u", "labels": found}, "status": status}, Pod)
    seen = worker_pod(pod)
    assert seen is not None
    assert (seen.index, seen.reason, seen.message) == (1, status["reason"], status["message"])
