"""Plays a script: three processes, undisturbed or with rank 1 killed once, and what is to be said of how that ended.

Two launchers: `everstep-run`, one agent for each process, on a real etcd; and what `torchrun` does, which ends all
processes when one is lost, and starts them again.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support import TESTS
from support.agent.agent_job import Job
from support.processes import warm_agent
from support.processes.ranks import Ranks
from support.processes.warm_python import warm

DRIVER = TESTS / "ordinary" / "ordinary_driver.py"
SIZE = 3
LIMIT = 60.0  # seconds that a run may take, on a machine that does much else
RESTARTS = 2  # by the launcher that starts all again


@dataclass(frozen=True)
class Played:
    """How a run ended. `found` is what the driver wrote, by rank, of processes that ended with their script."""

    codes: tuple[int, ...]
    found: tuple[dict[str, Any], ...]
    log: str
    seconds: float
    files: dict[str, str] = field(default_factory=dict)  # that the script wrote: name → text
    hung: bool = False
    killed: bool = False
    began: int = 0  # processes that took a step


def under_agents(
    folder: Path, endpoint: str, script: Path, kill: str = "", limit: float = LIMIT, patience: float | None = None
) -> Played:
    """`everstep-run --nnodes=3`, three times."""
    parent_is_ready()
    began = time.monotonic()
    with Job(
        folder, endpoint, str(DRIVER), str(script), nodes=str(SIZE), flags=("--max-restarts=0",),
        environ=_environ(folder, kill, patience),
    ) as job:  # fmt: skip
        job.start(SIZE)
        hung = False
        while any(a.process.poll() is None for a in job.agents):
            if time.monotonic() - began > limit:
                hung = True
                break
            time.sleep(0.02)
    codes = tuple(a.process.wait(30) for a in job.agents)
    log = "".join(f"--- agent {a.number}\n{a.log.read_text(errors='replace')}" for a in job.agents)
    return _ended(folder, codes, log, time.monotonic() - began, hung)


def under_one_agent(folder: Path, script: Path, kill: str = "", limit: float = LIMIT) -> Played:
    """`everstep-run --nproc-per-node=3`, as a user starts it on one machine."""
    parent_is_ready()
    began, hung, log = time.monotonic(), False, folder / "agent.log"
    with log.open("wb") as out:
        agent = warm().popen(
            warm_agent.__file__, f"--nproc-per-node={SIZE}", DRIVER, script, stdout=out, stderr=out,
            env={**os.environ, **_environ(folder, kill)},
        )  # fmt: skip
    try:
        code = agent.wait(limit)
    except subprocess.TimeoutExpired:
        agent.kill()
        hung, code = True, agent.wait()
    return _ended(folder, (code,) * SIZE, log.read_text(errors="replace"), time.monotonic() - began, hung)


def under_torchrun(
    folder: Path, script: Path, kill: str = "", limit: float = LIMIT, patience: float | None = None
) -> Played:
    """Rank by rank as torchrun would, with processes that begin warm."""
    parent_is_ready()
    began, hung, codes = time.monotonic(), False, [1]
    output = folder / "ranks.log"
    for _ in range(RESTARTS + 1):
        ranks = Ranks(warm(), SIZE, (DRIVER, script), output, {**os.environ, **_environ(folder, kill, patience)})
        try:
            while (found := ranks.poll()) is None:
                failed = any(p.returncode for p in ranks._processes)
                if failed or time.monotonic() - began > limit:
                    break
                time.sleep(0.02)
        finally:
            hung = found is None and not any(p.returncode for p in ranks._processes)
            ranks.kill()
        codes = [p.returncode or 0 for p in ranks._processes]
        killed = any(code < 0 for code in codes) and (folder / "killed").exists()
        if hung or not killed or not any(codes):
            break
    return _ended(folder, tuple(codes), output.read_text(errors="replace"), time.monotonic() - began, hung)


@cache
def parent_is_ready() -> None:
    """The process that all are forked from takes its time to begin, on a busy machine."""
    warm().run("-c", "pass", timeout=240)


def _environ(folder: Path, kill: str, patience: float | None = None) -> dict[str, str]:
    driven = {"ORDINARY_FOLDER": str(folder), "ORDINARY_KILL": kill}
    if patience is not None:
        driven["ORDINARY_PATIENCE"] = str(patience)
    return {**driven, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _ended(folder: Path, codes: tuple[int, ...], log: str, seconds: float, hung: bool) -> Played:
    found = [torch.load(path, weights_only=False) for path in folder.glob("*.pt")]
    files = {path.name: path.read_text() for path in sorted(folder.glob("*.txt"))}
    ordered = tuple(sorted(found, key=lambda told: int(told["rank"])))
    return Played(
        codes, ordered, log, seconds, files, hung, (folder / "killed").exists(), len(list(folder.glob("*.began")))
    )


# --- what is to be said of it


def refusal(played: Played) -> str | None:
    """The text by which the loop was refused on all ranks, if it was; what the session says in one error."""
    if not played.codes or not all(played.codes) or played.hung:
        return None
    found = re.findall(r"(?:LoopError|NotRecoverable): (.+(?:\n(?!\[rank\d|[\w.]*Error|---|\d\d:).+)*)", played.log)
    found += re.findall(r"the job was closed: (the ranks' collectives do not match.*)", played.log)
    # One rank prints it; a line of the agent about another one, which cuts it, may come before.
    return next((text for text in found if not text.endswith("…")), None)


def difference(played: Played, reference: Played | None, apart: str, near: float, compare_files: bool = True) -> str:
    """What keeps this from being the same end as the reference's: "" if nothing does. `apart`: a regular expression
    for the names of what each rank has for itself, which is compared with the same rank's only. `near`:
    how far numbers may be apart; 0 for bits."""
    if played.hung:
        return "hangs"
    if any(played.codes):
        return f"ends with exit codes {list(played.codes)}: {_last_error(played.log)}"
    if [told["rank"] for told in played.found] != list(range(SIZE)):
        return f"ranks {[told['rank'] for told in played.found]} ended, not 0, 1 and 2"
    first = played.found[0]
    for told in played.found[1:]:
        if told["step"] != first["step"]:
            return f"rank {told['rank']} ended after step {told['step']}, rank 0 after step {first['step']}"
        if found := _compare(_shared(told, apart), _shared(first, apart), near):
            return f"rank {told['rank']} and rank 0 differ in {found}"
    if reference is None:
        return ""
    if first["step"] != reference.found[0]["step"]:
        return f"ended after step {first['step']}, and undisturbed after step {reference.found[0]['step']}"
    for told, other in zip(played.found, reference.found, strict=True):
        if found := _compare(told["found"], other["found"], near):
            return f"rank {told['rank']} and the undisturbed run's differ in {found}"
    for name, text in reference.files.items() if compare_files else ():
        if played.files.get(name) != text:
            return f"{name} differs: {played.files.get(name)!r}, undisturbed {text!r}"
    return ""


def _shared(told: dict[str, Any], apart: str) -> dict[str, Any]:
    """What of a rank's findings must be that of all."""
    if not apart:
        return dict(told["found"])
    return {
        name: {k: v for k, v in value.items() if not re.search(apart, f"{name}.{k}")}
        if isinstance(value, dict)
        else value
        for name, value in told["found"].items()
        if not re.search(apart, name)
    }


def _last_error(log: str) -> str:
    found = re.findall(r"^(?:\S+: )?((?:[\w.]+(?:Error|Exception|Interrupt)|Signal)\b.*)$", log, re.MULTILINE)
    return str(found[-1])[:300] if found else log[-300:]


def _compare(a: Any, b: Any, near: float, name: str = "") -> str:
    """The first place where two contents differ; "" if none."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name}: {list(a.shape)} {a.dtype}, {list(b.shape)} {b.dtype}"
        if not near or not a.is_floating_point():
            same = bool(torch.equal(a, b))
        else:
            same = torch.allclose(a, b, rtol=near, atol=near, equal_nan=True)
        far = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        return "" if same else f"{name} by {far:.2g}"
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{name}: names {sorted(map(str, a.keys() ^ b.keys()))[:5]}"
        found = (_compare(a[k], b[k], near, f"{name}{'.' if name else ''}{k}") for k in a)
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return f"{name}: lengths {len(a)} and {len(b)}"
        found = (_compare(x, y, near, f"{name}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
    elif isinstance(a, float) and isinstance(b, float) and near:
        return "" if a == b or abs(a - b) <= near * (1 + abs(a)) or (a != a and b != b) else f"{name}: {a!r} and {b!r}"
    elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return "" if np.array_equal(a, b) else f"{name}: {a} and {b}"
    elif callable(a) or type(a).__module__ == "__main__":
        return ""
    else:
        return "" if a == b or (a != a and b != b) else f"{name}: {a!r} and {b!r}"
    return next((one for one in found if one), "")
