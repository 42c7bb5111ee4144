"""The environment of a training process: what torchrun sets, and what ours needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.agent.program import ERROR_FILE
from everstep.contract import env
from everstep.rendezvous.participant import Round


@dataclass(frozen=True, slots=True)
class Setting:
    """What all processes of an agent have in common. `most`: processes that the whole job may come to have."""

    inherited: Mapping[str, str]
    processes: int
    run_id: str
    role: str
    max_restarts: int
    socket: str
    virtual_local_rank: bool = False
    most: int = 1


def environment(
    setting: Setting, slot: int, round_: Round | None, error_file: str, calls_file: str = ""
) -> dict[str, str]:
    """Of local rank `slot`. Without a round it is a world of one, until the session brings it into a round."""
    found = dict(setting.inherited)
    if "OMP_NUM_THREADS" not in found and setting.processes > 1:
        found["OMP_NUM_THREADS"] = "1"
    first = round_.members[0] if round_ is not None else None
    rank = round_.first_process + slot if round_ is not None else 0
    size = round_.processes if round_ is not None else 1
    found |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(slot),
        "LOCAL_WORLD_SIZE": str(setting.processes),
        "GROUP_RANK": str(round_.rank if round_ is not None else 0),
        "GROUP_WORLD_SIZE": str(round_.world_size if round_ is not None else 1),
        "ROLE_NAME": setting.role,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": first.address if first is not None else "127.0.0.1",
        "MASTER_PORT": str(first.store_port if first is not None else 0),
        "TORCHELASTIC_RUN_ID": setting.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(max(0, round_.number - 1) if round_ is not None else 0),
        "TORCHELASTIC_MAX_RESTARTS": str(setting.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        ERROR_FILE: error_file,
        env.AGENT_SOCKET: setting.socket,
        env.MOST_PROCESSES: str(max(size, setting.most)),
        env.CALLS_FILE: calls_file,
    }
    found.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    for name in (env.ROUND, env.RENDEZVOUS):  # of whatever started the agent
        found.pop(name, None)
    if round_ is not None:
        found |= {env.ROUND: str(round_.number), env.RENDEZVOUS: round_.rendezvous}
    if setting.virtual_local_rank:
        found["LOCAL_RANK"] = "0"
        devices = found.get("CUDA_VISIBLE_DEVICES", "")
        shown = devices.split(",") if devices else [str(i) for i in range(setting.processes)]
        found["CUDA_VISIBLE_DEVICES"] = shown[slot] if slot < len(shown) else ""
    return found
