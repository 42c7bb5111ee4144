"""`everstep rehearse` as tests start it, and what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes import warm_rehearsal
from support.processes.warm_python import warm


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """`report`: what `--json` has; `shown` and `errors`: what stdout and stderr have."""

    code: int
    report: dict[str, Any]
    shown: str
    errors: str

    @property
    def findings(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.report["findings"]
        return found


def rehearse(
    folder: Path,
    *options: str,
    seconds: float,
    report: str = "r.json",
    arguments: Sequence[str] = (),
    script: str = "train.py",
    environ: dict[str, str] | None = None,
    reports: bool = True,
    cold: bool = False,
) -> Rehearsed:
    """Rehearse `script` in this folder, for at most `seconds`. `report`: its file, from there. `environ`: variables
    besides those of this process. `reports`: whether it has to write a report; else one that is missing is empty.
    `cold`: with interpreters of its own, as users have it; else with processes that begin warm."""
    (folder / report).unlink(missing_ok=True)
    command = ["--json", report, *options, script, *arguments]
    variables = os.environ | (environ or {})
    if cold:
        done = subprocess.run(
            [sys.executable, "-m", "everstep.cli.main", "rehearse", *command], cwd=folder, env=variables,
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    else:
        begins = warm(*warm_rehearsal.IMPORTED)
        begins.run("-c", "pass", timeout=240)  # on a busy machine the process that forks takes its time to begin
        done = begins.run(warm_rehearsal.__file__, *command, timeout=seconds, env=variables, cwd=folder)
    written = folder / report
    assert written.exists() or not reports, done.stderr[-2000:]
    body = json.loads(written.read_text()) if written.exists() else {}
    return Rehearsed(done.returncode, body, done.stdout, done.stderr)
