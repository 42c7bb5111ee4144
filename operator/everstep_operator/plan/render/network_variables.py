"""The variables of NCCL and gloo that `spec.network` stands for.

Invariant: each is only a default, which the template's own environment overrides.
"""

from __future__ import annotations

from everstep_operator.api.types import Fabric, TrainingJobSpec


def of_spec(spec: TrainingJobSpec) -> dict[str, str]:
    """Variables of the worker container, by the names in NCCL's and gloo's documentation."""
    network = spec.network
    if network is None:
        return {}
    variables = dict[str, str]()
    if network.fabric is not None:
        variables["NCCL_IB_DISABLE"] = "1" if network.fabric is Fabric.ETHERNET else "0"
    if network.interface is not None:
        variables["NCCL_SOCKET_IFNAME"] = f"={network.interface}"  # without the sign NCCL takes it for a prefix
        variables["GLOO_SOCKET_IFNAME"] = network.interface
    if network.adapters:
        variables["NCCL_IB_HCA"] = "=" + ",".join(network.adapters)
    if network.gid_index is not None:
        variables["NCCL_IB_GID_INDEX"] = str(network.gid_index)
    return variables
