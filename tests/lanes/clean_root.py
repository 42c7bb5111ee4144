"""Setup, lint and tests on a Debian that has nothing but what the README names; run whenever the set-up changes.

A root file system is made of Debian's packages, from the sources that this machine's apt is configured for. It holds
the packages of the README's `apt-get install` line, the checkout, and no program of this machine. Set-up happens in it
with the network, tests with the loopback alone. Docker and kind cannot run there: they need a machine. Needs root.

Invariant: where packages come from is read from the machine's configuration at run time, never written here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from support import ROOT
from testcluster import cache, packages, versions
from testcluster.proc import ClusterError, run
from testcluster.pybases import WHEELS

STEP_LIMIT = 1500.0  # seconds for one step, set-up with empty caches the longest
CHECKOUT = "/src/everstep"
DOWNLOADS = "/root/.cache"
# Files that say where packages come from and whom to trust; those that this machine has are copied.
CONFIGURATION = (
    "/etc/pip.conf", "/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt",
    "~/.config/pip/pip.conf", "~/.pip/pip.conf", "~/.config/uv/uv.toml", "~/.config/go/env", "~/.npmrc",
)  # fmt: skip
VARIABLES = re.compile(
    r"PIP_\w+|UV_\w+|NPM_CONFIG_\w+|GO(PROXY|SUMDB|PRIVATE|NOPROXY|NOSUMDB)|\w+_PROXY"
    r"|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|NODE_EXTRA_CA_CERTS",
    re.IGNORECASE,
)
# Every folder that starts a system program is in it, with the tests that start it, and one run with a kill. What needs
# an API server is not: building it takes ten minutes, and it starts no program that the others do not.
CHOSEN = (
    "agent/test_agent_partition.py",
    "agent/test_agent_alone.py",
    "rendezvous/test_rendezvous_etcd.py",
    "rendezvous/test_rendezvous_links.py",
    "storage/test_storage_backends.py",
    "checkpoint/test_checkpoint_parts.py",
    "worker/test_storage_s3_errors.py",
    "cluster/test_daemon.py",
    "cluster/test_s3.py",
    "local/test_kubelet_crash.py",
    "local/test_kubelet_pods.py",
    "train/test_boundary_exit.py",
    "run/test_run_demo.py",
)
MARKS = "not kind and not apiserver and not long"

ENTER = r"""
set -e
mount --make-rprivate /
mount --bind "$R" "$R"
mount -t proc proc "$R/proc"
mount -t sysfs sysfs "$R/sys"
mount --rbind /dev "$R/dev"
mount -t tmpfs tmpfs "$R/dev/shm"
mount -t tmpfs tmpfs "$R/run"
mount --bind "$DOWNLOADS" "$R/root/.cache"
if [ -d "$WHEELS" ]; then mount --bind -o ro "$WHEELS" "$R/src/shared/wheels"; fi
exec chroot "$R" /usr/bin/env -i "$@"
"""


def named_in_readme() -> list[str]:
    """Debian packages that the README tells its readers to install. Raises `ClusterError` if it names none."""
    found = re.findall(r"^\$ apt-get install (.+)$", (ROOT / "README.md").read_text(), re.M)
    if not found:
        raise ClusterError("README.md has no line `$ apt-get install …`: what a machine needs beforehand is not said")
    return sorted({package for line in found for package in line.split() if not package.startswith("-")})


def apt_sources() -> list[str]:
    """This machine's files of apt sources for the release that is tested, or nothing: then mmdebstrap has its own."""
    folder = Path("/etc/apt")
    files = [folder / "sources.list", *sorted(folder.glob("sources.list.d/*.list"))]
    files += sorted(folder.glob("sources.list.d/*.sources"))
    release = re.compile(rf"^(deb |Suites:).*\b{versions.DEBIAN}\b", re.M)
    return [str(file) for file in files if file.is_file() and release.search(file.read_text())]


def bootstrap(named: Sequence[str]) -> Path:
    """A tar of Debian's base with the packages named."""

    def make(out: Path) -> None:
        acquire = [line for line in run("apt-config", "dump").splitlines() if line.startswith("Acquire::")]
        options = out / "apt.conf"
        options.write_text("\n".join(acquire) + "\n")
        run(
            "mmdebstrap", "--variant=minbase", f"--aptopt={options}", f"--include={','.join(named)}",
            versions.DEBIAN, str(out / "root.tar"), *apt_sources(), log=cache.logs() / "clean-root.log",
        )  # fmt: skip

    return cache.artifact("clean-root", (versions.DEBIAN, *named), make) / "root.tar"


def copy_checkout(root: Path) -> None:
    """A clone, and over it the files as they are here, committed or not."""
    target = root / CHECKOUT.lstrip("/")
    run("git", "clone", "-q", "--no-hardlinks", str(ROOT), str(target))
    listed = run("git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        (target / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    run("git", "-C", str(target), "add", "--all")  # lint looks at what git knows


def copy_configuration(root: Path) -> None:
    for name in CONFIGURATION:
        file = Path(name).expanduser()
        if file.is_file():
            target = root / (f"root/{name[2:]}" if name.startswith("~/") else name.lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copy(file, target)
    for mounted in ("src/shared/wheels", DOWNLOADS.lstrip("/")):
        (root / mounted).mkdir(parents=True, exist_ok=True)


def environment(root: Path) -> dict[str, str]:
    """What a shell of the root has: nothing of this machine but where packages come from."""
    kept = {name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)}
    for name in [n for n, v in kept.items() if v.startswith("/") and not (root / v.lstrip("/")).exists()]:
        del kept[name]  # a path that is not in the root
    return kept | {
        "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "EVERSTEP_CACHE": "/var/cache/everstep",  # made anew; only what was downloaded is kept between runs
        "GOMODCACHE": f"{DOWNLOADS}/go-mod", "NPM_CONFIG_CACHE": f"{DOWNLOADS}/npm",
    }  # fmt: skip


def step(root: Path, downloads: Path, what: str, command: str, *, network: bool) -> None:
    """Run a shell command in the root's checkout. Raises `ClusterError` if it fails or runs too long."""
    spaces = ["--mount", "--pid", "--fork", "--kill-child", *([] if network else ["--net"])]
    loopback = "" if network else "ip link set lo up && "
    inside = [f"{name}={value}" for name, value in environment(root).items()]
    began = time.monotonic()
    print(f"##### clean root: {what}: {command}", flush=True)
    argv = ["unshare", *spaces, "bash", "-c", ENTER, "enter", *inside]
    try:
        done = subprocess.run(
            [*argv, "bash", "-c", f"cd {CHECKOUT} && {loopback}{command}"],
            env={**os.environ, "R": str(root), "DOWNLOADS": str(downloads), "WHEELS": str(WHEELS)},
            stdin=subprocess.DEVNULL, timeout=STEP_LIMIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise ClusterError(f"{what} ran longer than {STEP_LIMIT:.0f} s") from e
    if done.returncode != 0:
        raise ClusterError(f"{what} returned {done.returncode} on a Debian with {', '.join(named_in_readme())} alone")
    print(f"##### clean root: {what}: {time.monotonic() - began:.0f} s", flush=True)


def play(folder: Path) -> None:
    named = named_in_readme()
    tar = bootstrap(named)
    root, downloads = folder / "root", folder / "downloads"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    downloads.mkdir(exist_ok=True)
    run("tar", "-C", str(root), "--exclude=./dev/*", "-xf", str(tar))
    copy_checkout(root)
    copy_configuration(root)
    chosen = f"-m '{MARKS}' " + " ".join(f"tests/{name}" for name in CHOSEN)
    step(root, downloads, "setup", "make setup", network=True)
    step(root, downloads, "prepare", f".venv/bin/pytest -q --prepare tests/unit {chosen}", network=True)
    step(root, downloads, "lint", "make lint", network=False)
    step(root, downloads, "unit", ".venv/bin/python tests/lanes/lanes.py unit", network=False)
    step(root, downloads, "servers", f".venv/bin/pytest -n 3 --dist loadfile {chosen}", network=False)
    shutil.rmtree(root)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cold", action="store_true", help="download everything again")
    arguments = parser.parse_args()
    folder = cache.root() / "clean-root-run"
    try:
        if os.geteuid() != 0:
            raise ClusterError("only root can make and enter a root file system: run as root")
        packages.ensure((*packages.BOOTSTRAP, "git"), "make clean-root")
        if arguments.cold:
            shutil.rmtree(folder / "downloads", ignore_errors=True)
        with cache.lock("clean-root-run"):
            folder.mkdir(exist_ok=True)
            play(folder)
    except ClusterError as e:
        print(f"##### clean root FAILED: {e}\n##### it is kept in {folder / 'root'}", file=sys.stderr)
        return 1
    print("##### clean root: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
