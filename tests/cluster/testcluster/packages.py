"""Debian packages, installed only where a program they bring is missing.

A new machine has no package lists, so the lists are read first; the whole is skipped when nothing is missing.
"""

import os
import time

from testcluster import cache
from testcluster.proc import ClusterError, run, which

# What a program is looked up by, and the package that brings it.
DOCKER = {"dockerd": "docker.io", "docker": "docker.io", "iptables": "iptables"}
BOOTSTRAP = {"mmdebstrap": "mmdebstrap"}
CERTIFICATES = {"openssl": "openssl"}


def ensure(wanted: dict[str, str]) -> None:
    """Install the packages whose program is missing. Raises `ClusterError` where that needs root or apt."""
    missing = sorted({package for program, package in wanted.items() if which(program) is None})
    label = "packages " + " ".join(sorted(set(wanted.values())))
    if not missing:
        cache.say(0, label, "skipped, installed")
        return
    if os.geteuid() != 0 or which("apt-get") is None:
        raise ClusterError(f"missing: {', '.join(missing)}. Install them (this needs root on Debian) and run again.")
    began = time.monotonic()
    with cache.lock("apt"):
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "-qq", env=environment, log=cache.logs() / "apt-update.log")
        if "docker" in {p for p in wanted if which(p) is None} and "docker-cli" in run(
            "apt-cache", "pkgnames", "docker-cli"
        ):
            missing.append("docker-cli")  # Debian 13 took the client out of docker.io
        run(
            "apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing,
            env=environment, log=cache.logs() / "apt-install.log",
        )  # fmt: skip
    cache.say(time.monotonic() - began, label, f"installed {' '.join(missing)}")
