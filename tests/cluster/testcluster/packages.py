"""The system programs that the tests start: which folder of tests uses which, and where a missing one comes from.

This is the one list. A program that Debian's base lacks stands in `PACKAGES`, and in `FOLDERS` or `MARKERS` for the
tests that start it. `tests/conftest.py` makes sure of what the chosen folders need before the first test, and fails a
test that starts a program which is not declared for it.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from testcluster import cache
from testcluster.proc import ClusterError, run, which

# Program → Debian package that brings it.
PACKAGES = {
    "chromium": "chromium",
    "docker": "docker.io",
    "dockerd": "docker.io",
    "git": "git",
    "ip": "iproute2",
    "iptables": "iptables",
    "make": "make",
    "mmdebstrap": "mmdebstrap",
    "munged": "munge",
    "openssl": "openssl",
    "sbatch": "slurm-client",
    "scancel": "slurm-client",
    "scontrol": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "squeue": "slurm-client",
}

DOCKER = ("dockerd", "docker", "iptables")
BOOTSTRAP = ("mmdebstrap",)
CERTIFICATES = ("openssl",)
BROWSER = ("chromium",)  # tests/support/page/browser.py
SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue")  # tests/support/recipes/slurm.py
NETWORKS = ("ip", "iptables")  # tests/support/network/netspaces.py

# Folder below tests/ → programs that its tests and their fixtures start. Folders that are not named need none.
FOLDERS: dict[str, tuple[str, ...]] = {
    "agent": NETWORKS,
    "apiserver": CERTIFICATES,
    "cluster": CERTIFICATES,
    "conformance": CERTIFICATES,
    "e2e": ("git",),
    "local": (*CERTIFICATES, "git"),
    "recipes": ("git",),
    "rendezvous": (*NETWORKS, *CERTIFICATES),
    "run": ("make",),
    "soak": ("git", "make"),
    "unit": ("git", "make"),
}
# Marker → further programs of the tests that have it.
MARKERS: dict[str, tuple[str, ...]] = {
    "browser": BROWSER,
    "kind": (*DOCKER, *BOOTSTRAP, *CERTIFICATES),
    "slurm": SLURM,
}

# Debian's are too old: `toolchains.py` gets newer ones where a program has to be built, without root.
TOOLCHAINS = frozenset({"go", "node", "npm"})
# What every Debian has: the packages marked "Essential", and what they depend on.
ESSENTIAL = frozenset(
    {
        "awk", "bash", "cat", "chmod", "chown", "cp", "dash", "date", "dd", "df", "diff", "dpkg", "du", "echo", "env",
        "false", "find", "findmnt", "flock", "getent", "grep", "gzip", "head", "hostname", "id", "install", "kill",
        "ldconfig", "ldd", "ln", "ls", "mkdir", "mkfifo", "mktemp", "mount", "mv", "nice", "nohup", "nproc",
        "nsenter", "perl", "printf", "prlimit", "pwd", "readlink", "realpath", "renice", "rm", "rmdir", "sed", "seq",
        "setpriv", "setsid", "sh", "sha256sum", "sleep", "sort", "stat", "stdbuf", "sync", "tail", "tar", "taskset",
        "tee", "timeout", "touch", "true", "umount", "uname", "unshare", "wc", "xargs",
    }
)  # fmt: skip


def of(folder: str, markers: Iterable[str] = ()) -> set[str]:
    """Programs that a test of `tests/<folder>` with these markers may start, beside Debian's essential ones."""
    return {*FOLDERS.get(folder, ()), *(program for marker in markers for program in MARKERS.get(marker, ()))}


def declared(executable: str, allowed: Iterable[str]) -> bool:
    """Whether a test may start `executable`: a program of the system must be essential or among `allowed`.

    A path that is not in one of the system's folders is the project's own: of a virtual environment, the cache, or
    the test itself.
    """
    path = Path(executable)
    system = path.parent == Path(".") or str(path.parent) in {"/bin", "/sbin", "/usr/bin", "/usr/sbin"}
    return not system or path.name.startswith("python") or path.name in {*ESSENTIAL, *TOOLCHAINS, *allowed}


def ensure(wanted: Iterable[str], by: str = "the test cluster") -> None:
    """Install what brings the missing ones of `wanted`; `by` says who uses them.

    Raises `ClusterError` that names program, package and user where that needs root or apt.
    """
    missing = sorted(program for program in set(wanted) if which(program) is None)
    if missing:
        _install(missing, by)


def _install(missing: list[str], by: str) -> None:
    """A new machine has no package lists, so the lists are read first."""
    needed = sorted({PACKAGES[program] for program in missing})
    if os.geteuid() != 0 or which("apt-get") is None:
        raise ClusterError(
            f"{by}: uses {', '.join(missing)}, not installed here. Install Debian's {' '.join(needed)} (only root on "
            "Debian could do it for you) and run again."
        )
    began = time.monotonic()
    with cache.lock("apt"):
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "-qq", env=environment, log=cache.logs() / "apt-update.log")
        if "docker" in missing and "docker-cli" in run("apt-cache", "pkgnames", "docker-cli"):
            needed.append("docker-cli")  # Debian 13 took the client out of docker.io
        run(
            "apt-get", "install", "-y", "-qq", "--no-install-recommends", *needed,
            env=environment, log=cache.logs() / "apt-install.log",
        )  # fmt: skip
    cache.say(time.monotonic() - began, f"packages for {by}", f"installed {' '.join(needed)}")
