"""The environment of a training process: torchrun's variables and ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.contract import env
from everstep.contract.error_file import PATH as ERROR_FILE
from everstep.membership.world_state import Round

# What EVERSTEP_DEBUG sets, unless the job sets it itself.
_INFO = {"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO", "NCCL_DEBUG": "INFO"}
DEBUG = {
    "info": _INFO,
    "detail": {**_INFO, "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_SHOW_CPP_STACKTRACES": "1"},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all processes of an agent share. `least`, `most`: how many processes the whole job may
    have."""

    inherited: Mapping[str, str]
    processes: int
    run_id: str
    role: str
    max_restarts: int
    socket: str
    virtual_local_rank: bool = False
    most: int = 1
    least: int = 1


def environment(
    setting: Setting,
    slot: int,
    round_: Round | None,
    error_file: str,
    calls_file: str = "",
    last: Round | None = None,
    expected: tuple[int, int] | None = None,
) -> dict[str, str]:
    """The environment of local rank `slot`. Without a round, the session brings the process into one later. Until then
    it has the rank and the world that are to be expected, because scripts compute from these before the loop
    (`batch = 64 // WORLD_SIZE`): those of `last`, the agent's newest round; `expected`, the agent's rank and
    the number of agents in the round that will take it in; or of a job that has one size."""
    variables = dict(setting.inherited)
    if "OMP_NUM_THREADS" not in variables and setting.processes > 1:
        variables["OMP_NUM_THREADS"] = "1"
    for name in (env.ROUND, env.RENDEZVOUS, env.LAST_RANK):  # the agent may have inherited them
        variables.pop(name, None)
    variables |= of_round(slot, round_)
    if round_ is None:
        variables |= _expected(setting, slot, last, expected)
    variables |= {
        "LOCAL_RANK": str(slot),
        "LOCAL_WORLD_SIZE": str(setting.processes),
        "ROLE_NAME": setting.role,
        "TORCHELASTIC_RUN_ID": setting.run_id,
        "TORCHELASTIC_MAX_RESTARTS": str(setting.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        ERROR_FILE: error_file,
        env.AGENT_SOCKET: setting.socket,
        env.LEAST_PROCESSES: str(setting.least),
        env.MOST_PROCESSES: str(max(round_.processes if round_ is not None else 1, setting.most)),
        env.CALLS_FILE: calls_file,
    }
    if last is not None:
        variables[env.LAST_RANK] = str(last.first_process + slot)
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    for name, value in DEBUG.get(variables.get(env.DEBUG, "").lower(), {}).items():
        variables.setdefault(name, value)
    if setting.virtual_local_rank:
        variables["LOCAL_RANK"] = "0"
        devices = variables.get("CUDA_VISIBLE_DEVICES", "")
        shown = devices.split(",") if devices else [str(i) for i in range(setting.processes)]
        variables["CUDA_VISIBLE_DEVICES"] = shown[slot] if slot < len(shown) else ""
    return variables


def _expected(setting: Setting, slot: int, last: Round | None, expected: tuple[int, int] | None) -> dict[str, str]:
    if last is not None:
        return _rank_variables(last.first_process + slot, last.processes, last.rank, last.world_size)
    if expected is not None:
        rank, size = expected
        each = setting.processes
        return _rank_variables(rank * each + slot, size * each, rank, size)
    if setting.least == setting.most:
        rank = env.rank_if_all_are_there(setting.inherited, setting.processes, slot)
        return _rank_variables(rank, setting.most, rank // setting.processes, setting.most // setting.processes)
    return {}


def _rank_variables(rank: int, size: int, group_rank: int, group_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(group_size),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
    }


def of_round(slot: int, round_: Round | None) -> dict[str, str]:
    """The variables that change with the round; a process that goes on in the next round sets them anew."""
    if round_ is None:
        ranks, address, port, before = _rank_variables(0, 1, 0, 1), "127.0.0.1", 0, 0
    else:
        ranks = _rank_variables(round_.first_process + slot, round_.processes, round_.rank, round_.world_size)
        address, port = round_.members[0].address, round_.members[0].store_port
        before = max(0, round_.number - 1)
    variables = ranks | {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(before),
    }
    if round_ is not None:
        variables |= {env.ROUND: str(round_.number), env.RENDEZVOUS: round_.rendezvous}
    return variables
