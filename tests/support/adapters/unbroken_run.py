"""Runs a script under `everstep-run` with three processes of one agent, and compares how two runs ended."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.adapters.adapter_run import MODULES, environment
from support.processes import warm_agent
from support.processes.ranks import Ranks
from support.processes.warm_python import Warm, warm

SIZE = 3
SECONDS = 240
TORCH = "torch,torch.distributed,torch._dynamo,"
AGENT, TORCHRUN = "everstep.agent.main", "torch.distributed.run"


@dataclass(frozen=True, slots=True)
class Played:
    """`found`: what each rank has written at its end. `steps`: those that each process began, by pid."""

    folder: Path
    code: int
    output: str
    found: list[dict[str, Any]]
    steps: dict[int, list[int]]

    @property
    def survivors(self) -> set[int]:
        """Processes that began with step 0 and were there at the end."""
        began = {pid for pid, steps in self.steps.items() if steps[0] == 0}
        return began & {found["pid"] for found in self.found}


def play(folder: Path, script: Path, *arguments: object, preload: str, restarts: int = 1, agent: str = AGENT) -> Played:
    """`preload`: modules besides torch's. The script runs in `folder`, which is made, and writes into it."""
    folder.mkdir()
    # One process per framework is forked from, in all tests: to import it takes longer than most of these runs.
    parent = warm(*MODULES[preload.rpartition(".")[2]])
    environ = {**environment(), "EVERSTEP_PRELOAD": TORCH + preload, "GLOO_SOCKET_IFNAME": "lo"}
    if agent == TORCHRUN:
        code = _under_torchrun(parent, folder, (script, *arguments), environ)
    else:
        job = f"--rdzv-id={folder.name}-{os.getpid()}"  # of its own: a request reaches all jobs of its name
        flags = (f"--nproc-per-node={SIZE}", "--standalone", job, f"--max-restarts={restarts}")
        with (folder / "log").open("w") as log:
            process = parent.popen(
                warm_agent.__file__, *flags, script, *arguments, stdout=log, stderr=log, env=environ, cwd=folder
            )
        try:
            code = process.wait(SECONDS)
        finally:
            process.kill()  # its processes die with it
    found = [torch.load(p, weights_only=False) for p in sorted(folder.glob("*.pt"))]
    steps = {int(p.stem): [int(line.split()[0]) for line in p.open()] for p in folder.glob("*.steps")}
    return Played(folder, code, (folder / "log").read_text(), found, steps)


def _under_torchrun(parent: Warm, folder: Path, argv: Sequence[object], environ: Mapping[str, str]) -> int:
    """Rank by rank as torchrun would, which starts none again; the first exit code that is not 0, or 0."""
    ranks = Ranks(parent, SIZE, argv, folder / "log", environ, cwd=folder)
    try:
        codes = ranks.wait(SECONDS)
    finally:
        ranks.kill()
    return next(filter(None, codes), 0)


def flat(value: Any, name: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        return {name: value}
    return {k: v for key, one in items for k, v in flat(one, f"{name}.{key}").items()}


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    one, other = (flat({k: v for k, v in found.items() if k != "pid"}) for found in (a, b))
    assert one.keys() == other.keys()
    return [k for k, v in one.items() if not (torch.equal(v, other[k]) if torch.is_tensor(v) else v == other[k])]
