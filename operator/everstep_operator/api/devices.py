"""Counts the devices that a container asks for: `processesPerReplica: auto` is their number.

A device plugin's resource has a number, whose meaning the vendors document. What has none here is not guessed: a count
of 1 for eight devices would train on one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from everstep_operator.errors import TerminalError

# A process on each: GPUs of NVIDIA and AMD, also shared ones, NVIDIA's MIG instances, AMD's partitions, Intel's GPUs,
# Gaudi, cores of Neuron.
_COUNTED = re.compile(
    r"[^/]+/gpu(?:\.shared)?|nvidia\.com/mig-[^/]+|amd\.com/[a-z]+_nps\d+|gpu\.intel\.com/(?:i915|xe)"
    r"|habana\.ai/gaudi|aws\.amazon\.com/neuroncore"
)
# Network cards, files, page sizes, and what Kubernetes itself counts: nothing that trains.
_OTHER = re.compile(
    r"[^/]+|(?:[^/]*\.)?kubernetes\.io/.+|rdma/.+|[^/]+/(?:[^/]*(?:efa|hca|ib|rdma|roce|sriov|nic|vf|fuse|kvm|tun)[^/]*)"
    r"|gpu\.intel\.com/(?:memory|tiles|millicores|[^/]+_monitoring).*"
)


class Uncountable(TerminalError):
    """The number of devices is not known. Its text says of which resource, and what to write instead."""


def count(container: Mapping[str, Any]) -> int:
    """Devices in the container's limits, else in its requests; 0 without any. Raises Uncountable."""
    resources = container.get("resources") or {}
    if resources.get("claims"):
        names = ", ".join(str(c.get("name")) for c in resources["claims"] if isinstance(c, Mapping))
        raise Uncountable(f"cannot tell how many devices the resource claims {names} hold; write the number")
    for kind in ("limits", "requests"):
        wanted = {str(k): str(v) for k, v in (resources.get(kind) or {}).items()}
        counts = {k: v for k, v in wanted.items() if _COUNTED.fullmatch(k)}
        unknown = [k for k in wanted if not _COUNTED.fullmatch(k) and not _OTHER.fullmatch(k)]
        if odd := next((k for k, v in counts.items() if not v.isdecimal()), None):
            raise Uncountable(f"cannot read {counts[odd]!r} of the resource {odd} as a number of devices; write one")
        if counts:
            return sum(map(int, counts.values()))
        if unknown:
            raise Uncountable(f"does not know how many processes the resource {unknown[0]} is for; write the number")
    return 0
