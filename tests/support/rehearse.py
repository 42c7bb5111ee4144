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
    environ: dict[str, str] | None = None,
    reports: bool = True,
) -> Rehearsed:
    """Rehearse `train.py` in this folder, for at most `seconds`. `report`: its file, from there. `environ`: variables
    besides those of this process. `reports`: whether it has to write a report; else one that is missing is empty."""
    (folder / report).unlink(missing_ok=True)
    command = [sys.executable, "-m", "everstep.cli.main", "rehearse", "--json", report, *options, "train.py"]
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=os.environ | (environ or {}), capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip
    written = folder / report
    assert written.exists() or not reports, done.stderr[-2000:]
    body = json.loads(written.read_text()) if written.exists() else {}
    return Rehearsed(done.returncode, body, done.stdout, done.stderr)
