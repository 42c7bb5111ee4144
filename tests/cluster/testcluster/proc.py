"""Running other programs, so that a failure says what failed and where the rest of the story is.

Invariant: no command runs without a time limit, and no failure is silent.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL_LINES = 25


class ClusterError(Exception):
    """Something the test cluster needs could not be had; the message says what to do about it."""


class CommandError(ClusterError):
    """A command returned non-zero or ran past its limit."""

    def __init__(self, argv: Sequence[str], why: str, output: str) -> None:
        tail = "\n".join(output.strip().splitlines()[-TAIL_LINES:])
        super().__init__(f"`{' '.join(argv)[:300]}` {why}\n{tail}")
        self.output = output


def which(program: str) -> str | None:
    """Path of `program`, also in the sbin folders that a plain user's PATH lacks."""
    return shutil.which(
        program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
    )


def run(
    *argv: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: bytes | None = None,
    log: Path | None = None,
    timeout: float = 900,
) -> str:
    """Standard output of `argv`. Raises `CommandError`; `timeout` is in seconds; all output also goes to `log`."""
    full_env = {**os.environ, **env} if env else None
    try:
        done = subprocess.run(
            argv,
            env=full_env,
            cwd=cwd,
            input=stdin if stdin is not None else b"",
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandError(argv, "is not installed", str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(
            argv, f"ran longer than {timeout:.0f} s", (error.stderr or b"").decode(errors="replace")
        ) from error
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(out + err)
    if done.returncode != 0:
        raise CommandError(argv, f"returned {done.returncode}", out + err)
    return out


def succeeds(*argv: str, timeout: float = 60) -> bool:
    """Whether `argv` exists, ends within `timeout` seconds and returns 0."""
    try:
        run(*argv, timeout=timeout)
    except CommandError:
        return False
    return True
