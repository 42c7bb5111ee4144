"""Worlds of real processes, one after the other, from one warm process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from support.processes.warm_python import warm


def results_of(program: Path, out: Path, *specs: str, timeout: float = 280) -> list[list[dict[str, Any]]]:
    """Each world's results by rank. Fails with what the processes printed if any of them failed."""
    out.mkdir(exist_ok=True)
    variables = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
    done = warm().run(program, out, *specs, timeout=timeout, env=variables)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    assert not any(any(world) for world in codes), (codes, done.stderr)
    return [
        [json.loads((out / f"{number}-{rank}.json").read_text()) for rank in range(len(world))]
        for number, world in enumerate(codes)
    ]
