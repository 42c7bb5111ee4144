"""Programs that a release starts, and the checkout's git."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from release.errors import ReleaseError

BIN = Path(sys.executable).parent
UV, CYCLONEDX = BIN / "uv", BIN / "cyclonedx-py"
LIMIT = 900.0  # seconds for one program; downloading PyTorch takes longest
LAST = 15  # lines of a failed program's errors


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Its output. Raises `ReleaseError` with the last lines of its errors if it fails, is missing or takes too long."""
    name = Path(command[0]).name
    try:
        ended = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            cwd=cwd,
            env={**os.environ, **variables},
        )
    except FileNotFoundError as e:
        raise ReleaseError(f"the program {command[0]} is missing: run `make setup`") from e
    except subprocess.TimeoutExpired as e:
        raise ReleaseError(f"{name} {command[1]} took longer than {LIMIT:.0f} s") from e
    if ended.returncode:
        words = "\n".join((ended.stderr.strip() or ended.stdout.strip()).splitlines()[-LAST:])
        raise ReleaseError(f"{name} {' '.join(map(str, command[1:4]))}… ended with {ended.returncode}:\n{words}")
    return ended.stdout


def ended(program: str, work: Callable[[], None]) -> int:
    """The exit code of a program that does this. What it refuses is one line for the person."""
    try:
        work()
    except ReleaseError as e:
        print(f"{program}: {e}", file=sys.stderr)
        return 1
    return 0


def git(root: Path, *arguments: str) -> str:
    return run("git", "-C", root, *arguments).strip()


def refuse_changes(root: Path) -> None:
    """Raises `ReleaseError` if a file of the checkout differs from its commit or is unknown to git."""
    changes = git(root, "status", "--porcelain").splitlines()
    if changes:
        more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
        raise ReleaseError(
            f"the tree is dirty: {changes[0].strip()}{more}. Commit it, or put it away with `git stash -u`"
        )
