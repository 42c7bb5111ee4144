"""Reads torchrun's command line without importing torch.

As in torchrun, every flag can also be given as `PET_<FLAG>` in the environment. Flags for how torchrun starts or polls
its processes are accepted and have no effect: here a fork server forks the processes and reports their ends. Invariant:
a flag is obeyed, or the user is told that it is refused or has no effect.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.agent.decide.stall import FACTOR
from everstep.agent.preload import preloaded
from everstep.contract import env
from everstep.version import __version__

OUR_BACKENDS = ("everstep", "etcd-v3")
# Optimizers import torch._dynamo at their first use, and that takes longer than importing torch itself.
MODULES = "torch,torch.distributed,torch._dynamo"
NUMA = ("node", "socket", "exclusive", "core-complex")
# The modules that the fork server imports once for all processes; torchrun has no flag for that.
PRELOAD = "EVERSTEP_PRELOAD"
GRACE_SHARE = 0.85  # of the grace period is for the processes


class UsageError(ValueError):
    """A flag or its value is wrong; the message names it and what is expected."""


@dataclass(frozen=True, slots=True)
class Program:
    """What each training process runs: a script, a module (`python -m`), or any executable."""

    target: str
    arguments: tuple[str, ...]
    module: bool = False
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of `everstep-run`. `local`: there is one agent, and it needs no round store."""

    program: Program
    nodes: tuple[int, int]
    processes: str  # a number, or the kind of device to count
    backend: str
    endpoint: str
    run_id: str
    rendezvous: Mapping[str, str]
    local: bool
    max_restarts: int
    role: str
    log_dir: str | None
    redirects: str
    tee: str
    filter: frozenset[int] | None
    address: str | None
    signals: tuple[str, ...]
    shutdown_seconds: float
    virtual_local_rank: bool
    preload: tuple[str, ...]
    recovery_seconds: float
    hang_seconds: float
    grace_seconds: float  # from SIGTERM until all processes must have ended
    hang_factor: float
    numa: str | None = None  # how processes are bound to the CPUs beside their GPU
    unused: tuple[str, ...] = ()  # flags that were given and change nothing

    @property
    def ours(self) -> bool:
        """Whether this rendezvous is ours; every other one is left to torchrun."""
        return self.local or self.backend in OUR_BACKENDS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The flags; `torchrun --help` describes torchrun's own ones."""
    p = _Parser(
        prog="everstep-run",
        description="Runs a training script as torchrun does, and goes on when processes, agents or nodes are lost.",
        epilog="Every flag of torchrun can be given; also as PET_<FLAG> in the environment.",
        allow_abbrev=True,
    )

    p.add_argument("--version", action="version", version=f"everstep-run {__version__}")

    def value(*names: str, default: str = "", text: str) -> None:
        both = _spellings(names)
        name = names[-1].removeprefix("--").replace("-", "_")
        default = environ.get(f"PET_{name.upper()}", default)
        p.add_argument(
            *both, dest=name, default=default, help=f"{text} (default: {default or 'none'})".replace("%", "%%")
        )

    def switch(*names: str, text: str) -> None:
        both = _spellings(names)
        name = names[-1].removeprefix("--").replace("-", "_")
        variable = f"PET_{name.upper()}"
        if not (given := environ.get(variable, "0")).isdecimal():  # as in torchrun, any number but 0 means yes
            raise UsageError(f"{variable}={given}: 0 or 1 is expected")
        p.add_argument(*both, dest=name, action="store_true", default=int(given) != 0, help=text)

    value("--nnodes", default="1:1", text="agents, as N or MIN:MAX")
    value("--nproc-per-node", default="1", text="processes for each agent: a number, auto, gpu, cpu, xpu")
    value("--rdzv-backend", default="static", text="everstep, etcd-v3, or one of torch's own, which torchrun runs")
    value("--rdzv-endpoint", text="where the rendezvous is, host:port")
    value("--rdzv-id", default="none", text="name of the job; all its agents give the same, and no other job's")
    value("--rdzv-conf", text="settings of the rendezvous, as key=value,key=value")
    switch("--standalone", text="one agent, no rendezvous to configure")
    value("--max-restarts", default="0", text="failures of the program that the whole job may survive")
    value("--role", default="default", text="name in front of each line of output that is teed")
    switch("-m", "--module", text="the script is a module, run as python -m does")
    switch("--no-python", text="the script is an executable")
    switch("--run-path", text="taken for torchrun's sake: a script is always run in a forked Python")
    value("--log-dir", text="folder for log and error files")
    value("-r", "--redirects", default="0", text="to log files and no console: 0 none, 1 stdout, 2 stderr, 3 both")
    value("-t", "--tee", default="0", text="to log files and console, counted as in --redirects")
    value("--local-ranks-filter", text="local ranks that may write to the console, as 0,1")
    value("--node-rank", default="0", text="for torch's static rendezvous")
    value("--master-addr", default="127.0.0.1", text="for torch's static rendezvous")
    value("--master-port", text="for torch's static rendezvous")
    value("--local-addr", text="address of this machine for the others")
    value("--signals-to-handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", text="signals that are passed on")
    # In a pod, what its grace period leaves: a save may need it.
    shutdown = f"{_grace(environ):g}" if env.GRACE_SECONDS in environ else "30"
    value("--shutdown-timeout", default=shutdown, text="seconds between the signal and SIGKILL")
    switch("--virtual-local-rank", text="LOCAL_RANK is 0 everywhere, and each process sees its own device only")
    for name, default in (("--monitor-interval", "0.1"), ("--start-method", "spawn")):
        value(name, default=default, text="taken for torchrun's sake, without meaning here")
    value("--numa-binding", text="bind each process to the CPUs beside its GPU: " + ", ".join(NUMA))
    for name in ("--event-log-handler", "--logs-specs"):
        value(name, text="torchrun's; refused here")
    for name in ("--duplicate-stdout-filters", "--duplicate-stderr-filters"):
        value(name, text="torchrun's; refused here")
    if env.MAX_RESTARTS in environ:
        p.set_defaults(max_restarts=environ[env.MAX_RESTARTS])
    p.add_argument("training_script", help="the script, module or executable")
    p.add_argument("training_script_args", nargs=argparse.REMAINDER, help="what it is given")
    return p


def _spellings(names: tuple[str, ...]) -> list[str]:
    """The names, also with underscores, which torchrun accepts too."""
    return [*names, *("--" + n[2:].replace("-", "_") for n in names if "-" in n[2:])]


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """Raises UsageError; ends Python for `--help`, as argparse does."""
    a = parser(environ).parse_args(list(argv))
    low, high = _nodes(a.nnodes)
    local = a.standalone or (high == 1 and a.rdzv_backend == "static" and not (a.rdzv_endpoint or a.master_port))
    if a.standalone and high > 1:
        raise UsageError(f"--nnodes={a.nnodes}: --standalone is for one agent")
    arguments = Arguments(
        program=Program(a.training_script, tuple(a.training_script_args), a.module, a.no_python),
        nodes=(low, high),
        processes=_processes(a.nproc_per_node),
        backend=a.rdzv_backend,
        endpoint=a.rdzv_endpoint,
        run_id=a.rdzv_id,
        rendezvous=_pairs(a.rdzv_conf),
        local=local,
        max_restarts=int(_number("--max-restarts", a.max_restarts, whole=True)),
        role=a.role,
        log_dir=a.log_dir or None,
        redirects=_streams("--redirects", a.redirects),
        tee=_streams("--tee", a.tee),
        filter=_ranks(a.local_ranks_filter),
        address=a.local_addr or None,
        signals=tuple(s.strip() for s in a.signals_to_handle.split(",") if s.strip()),
        shutdown_seconds=_number("--shutdown-timeout", a.shutdown_timeout),
        virtual_local_rank=a.virtual_local_rank,
        preload=_preload(a, environ),
        recovery_seconds=_number(env.RECOVERY_SECONDS, environ.get(env.RECOVERY_SECONDS, "300")),
        hang_seconds=_number(env.HANG_SECONDS, environ.get(env.HANG_SECONDS, "60")),
        grace_seconds=_grace(environ),
        hang_factor=_number(env.HANG_FACTOR, environ.get(env.HANG_FACTOR, f"{FACTOR:g}")),
        numa=_numa(a.numa_binding),
        unused=_unused(a, environ),
    )
    if arguments.ours:
        _refuse(a)
    return arguments


def _grace(environ: Mapping[str, str]) -> float:
    """The processes' part of the grace period."""
    return GRACE_SHARE * max(1.0, _number(env.GRACE_SECONDS, environ.get(env.GRACE_SECONDS, "30")))


def _preload(a: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The modules that the environment names, or else ours and the slow ones among the script's imports."""
    if (named := environ.get(PRELOAD)) is not None:
        return tuple(m.strip() for m in named.split(",") if m.strip())
    return (*MODULES.split(","), *(() if a.module or a.no_python else preloaded(a.training_script)))


def _refuse(a: argparse.Namespace) -> None:
    if a.module and a.no_python:
        raise UsageError("--module and --no-python exclude each other")
    names = ("logs_specs", "duplicate_stdout_filters", "duplicate_stderr_filters")
    given = [name for name in names if getattr(a, name)]
    if a.event_log_handler not in ("", "null"):
        given.append("event_log_handler")
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"{flags}: everstep-run does not do this; torchrun does, with the same --rdzv-backend")


def _unused(a: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Flags and variables that differ from torchrun's default and have no effect here."""
    # This variable has no effect: a round's store is never in a training process, and processes always find it.
    shared = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    variables = (shared,) if environ.get(shared, "0") == "1" else ()
    defaults = {"monitor_interval": "0.1", "start_method": "spawn", "node_rank": "0", "run_path": False}
    flags = tuple("--" + n.replace("_", "-") for n, default in defaults.items() if getattr(a, n) != default)
    return flags + variables


def _numa(text: str) -> str | None:
    if text and text not in NUMA:
        raise UsageError(f"--numa-binding={text}: one of {', '.join(NUMA)} is expected")
    return text or None


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise UsageError(f"--nnodes={text}: N or MIN:MAX with 1 <= MIN <= MAX is expected")
    return low, high


def _processes(text: str) -> str:
    if text in ("auto", "gpu", "cpu", "xpu") or (text.isdecimal() and int(text) >= 1):
        return text
    raise UsageError(f"--nproc-per-node={text}: a number of at least 1, auto, gpu, cpu or xpu is expected")


def _number(flag: str, text: str, *, whole: bool = False) -> float:
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        number = -1
    if not 0 <= number < 1e9:
        raise UsageError(f"{flag}={text}: a number of at least 0 is expected")
    return number


def _pairs(text: str) -> dict[str, str]:
    pairs = {}
    for part in (p.strip() for p in text.split(",")):
        key, equals, value = part.partition("=")
        if part and not (equals and key.strip()):
            raise UsageError(f"--rdzv-conf: {part!r}: key=value is expected")
        if part:
            pairs[key.strip()] = value.strip()
    return pairs


def _ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise UsageError(f"--local-ranks-filter={text}: local ranks with commas between are expected, as 0,1")
    return frozenset(int(part) for part in text.split(","))


def _streams(flag: str, text: str) -> str:
    """`N`, or `RANK:N,RANK:N`, where N is 0 none, 1 stdout, 2 stderr, 3 both."""
    if re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
        return text
    raise UsageError(f"{flag}={text}: 0, 1, 2 or 3, or such a number for each local rank as 0:3,1:0, is expected")


def streams(text: str, local_rank: int) -> tuple[bool, bool]:
    """Whether the value, which `read` has checked, selects stdout and stderr of this local rank."""
    if ":" in text:
        text = dict(part.split(":") for part in text.split(",")).get(str(local_rank), "0")
    return bool(int(text) & 1), bool(int(text) & 2)
