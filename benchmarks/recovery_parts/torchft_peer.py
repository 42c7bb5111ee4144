"""An interpreter that has torchft, in an environment of its own: it is not one of this project's dependencies."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "train_torchft.py"
FOLDER = ROOT / ".everstep" / "torchft"
WHEELS = ROOT.parent / "shared" / "wheels"
VERSION = "torchft-nightly"


@cache
def interpreter() -> Path:
    """Made on the first call, which takes a minute."""
    found = FOLDER / "bin" / "python"
    if not (FOLDER / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
        torch = ["--find-links", str(WHEELS), "torch==2.13.0+cpu"] if WHEELS.is_dir() else ["torch>=2.13,<2.14"]
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "pip", "install", "-q", "--python", found, *torch, VERSION, "numpy"], check=True)
        (FOLDER / "made").touch()
    return found
