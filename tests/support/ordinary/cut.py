"""Runs of the scripts whose model tensor parallelism has cut."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from support import TESTS
from support.ordinary.ordinary_play import DRIVER, _compare, _environ, parent_is_ready
from support.processes import warm_agent
from support.processes.warm_python import warm

SCRIPTS = TESTS / "ordinary" / "cut"
SIZE = 4
LIMIT = 200.0  # seconds that a run may take, on a machine that does much else


def found(folder: Path) -> list[dict[str, Any]]:
    """What each rank has ended with, by rank."""
    told = [torch.load(path, weights_only=False) for path in folder.glob("*.pt")]
    return sorted(told, key=lambda one: int(one["rank"]))


def under_agent(folder: Path, script: Path, kill: str = "", size: int = SIZE) -> tuple[int, str]:
    """One agent with all processes; its exit code, and what was said."""
    folder.mkdir()
    parent_is_ready()
    flags = (f"--nproc-per-node={size}", "--max-restarts=0")
    with (folder / "log").open("wb") as out:
        agent = warm().popen(
            warm_agent.__file__, *flags, DRIVER, script, stdout=out, stderr=out,
            env={**os.environ, **_environ(folder, kill)},
        )  # fmt: skip
    try:
        code = agent.wait(LIMIT)
    finally:
        agent.kill()
    return code, (folder / "log").read_text(errors="replace")


def undisturbed(folder: Path, name: str, size: int = SIZE) -> list[dict[str, Any]]:
    return _undisturbed(folder, name, size)


@cache  # of all arguments, however a test passes them: a folder is made once
def _undisturbed(folder: Path, name: str, size: int) -> list[dict[str, Any]]:
    code, log = under_agent(folder / f"{name}-{size}", SCRIPTS / f"{name}.py", size=size)
    assert code == 0, log[-3000:]
    return found(folder / f"{name}-{size}")


def differences(some: list[dict[str, Any]], others: list[dict[str, Any]], near: float = 0.0) -> str:
    assert [one["rank"] for one in some] == [one["rank"] for one in others]
    assert all(one["step"] == 12 for one in (*some, *others))
    pairs = ((f"rank {a['rank']}: ", _compare(a["found"], b["found"], near)) for a, b in zip(some, others, strict=True))
    return "; ".join(f"{rank}{what}" for rank, what in pairs if what)
