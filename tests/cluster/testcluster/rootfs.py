"""Debian root file systems, from packages alone: what images are made of where none can be pulled."""

from pathlib import Path

from testcluster import cache, packages, versions
from testcluster.proc import run

# Nothing in a test image reads these; they are a third of a minimal Debian.
CLUTTER = "usr/share/doc usr/share/man usr/share/locale usr/share/i18n var/cache/apt var/lib/apt/lists"
IPTABLES_NAMES = "iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore"

NODE = (
    "ca-certificates iptables systemd dbus containerd runc containernetworking-plugins iproute2 ethtool conntrack socat"
    " mount kmod procps util-linux hostname"
)


def _bootstrap(name: str, variant: str, include: str, hooks: tuple[str, ...]) -> Path:
    def make(out: Path) -> None:
        packages.ensure(packages.BOOTSTRAP)
        arguments = [f"--variant={variant}", f"--include={','.join(include.split())}", *hooks]
        run("mmdebstrap", *arguments, versions.DEBIAN, str(out / "root.tar"), log=cache.logs() / f"{name}.log")

    return cache.artifact(name, (variant, include, *hooks, versions.DEBIAN), make) / "root.tar"


def _clean(kind: str) -> str:
    return f"--{kind}-hook=cd $1 && rm -rf {CLUTTER}"


def node() -> Path:
    """What a node runs: systemd, containerd, runc, CNI plug-ins."""
    return _bootstrap("rootfs-node", "minbase", NODE, ())


def python() -> Path:
    """A stand-in for `python:3.11-slim`: `python` and `pip` on the PATH, and pip may install into the system."""
    return _bootstrap(
        "rootfs-python",
        "minbase",
        "python3 python3-pip python3-venv ca-certificates",
        (
            "--customize-hook=rm $1/usr/lib/python3.*/EXTERNALLY-MANAGED",
            "--customize-hook=ln -s /usr/bin/python3 $1/usr/local/bin/python; ln -s /usr/bin/pip3 $1/usr/local/bin/pip",
            _clean("customize"),
        ),
    )


def iptables() -> Path:
    """The least that kube-proxy and podnet need."""
    return _tables("rootfs-iptables", "iptables busybox-static")


def ipset() -> Path:
    """The least that kube-router's firewall needs."""
    return _tables("rootfs-ipset", "iptables ipset busybox-static")


def _tables(name: str, include: str) -> Path:
    """The variant `extract` runs no maintainer scripts, so links are made here."""
    return _bootstrap(
        name,
        "extract",
        include,
        (
            f'--extract-hook=for n in {IPTABLES_NAMES}; do ln -sf xtables-nft-multi "$1/usr/sbin/$n"; done',
            '--extract-hook=mkdir -p "$1/bin" "$1/tmp"; for n in sh cat ls ip; do ln -sf busybox "$1/bin/$n"; done',
            _clean("extract"),
            "--extract-hook=cd $1 && rm -rf var/lib/dpkg usr/lib/x86_64-linux-gnu/gconv usr/lib/locale",
        ),
    )
