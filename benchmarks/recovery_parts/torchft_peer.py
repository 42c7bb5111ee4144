"""An interpreter that has torchft, in an environment of its own: it is not one of this project's dependencies."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "train_torchft.py"
WHEELS = ROOT.parent / "shared" / "wheels"
NIGHTLY = "torchft-nightly"
RELEASE = "torchft"


@cache
def interpreter(distribution: str = NIGHTLY) -> Path:
    """The newest version of NIGHTLY or RELEASE. Made on the first call, which takes a minute."""
    folder = ROOT / ".everstep" / distribution
    found = folder / "bin" / "python"
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        torch = ["--find-links", str(WHEELS), "torch==2.13.0+cpu"] if WHEELS.is_dir() else ["torch>=2.13,<2.14"]
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "pip", "install", "-q", "--python", found, *torch, distribution, "numpy"], check=True)
        (folder / "made").touch()
    return found
