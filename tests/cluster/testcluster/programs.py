"""The Go programs: Kubernetes, etcd, CoreDNS, kind, helm, versitygw, Prometheus and the small ones in `go/`.

All are static builds of tagged modules, verified against go.sum or Go's checksum database. They need Go
(`toolchains.py`) and its module proxy, no compiler for C, no root and no docker: the control plane without nodes is
made of nothing else.
"""

import json
import os
import shutil
from pathlib import Path

from testcluster import cache, toolchains, versions
from testcluster.proc import ClusterError, run

SOURCES = cache.HERE / "go"
ENVIRONMENT = {"GOFLAGS": "-buildvcs=false", "CGO_ENABLED": "0"}
SMALL = "-s -w"  # no symbol tables: half the size, and these programs are not debugged here
BUILD_LIMIT = 2400.0  # seconds; the API server alone takes 260 on two cold cores

KUBERNETES = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubeadm",
    "kubectl",
)
# A folder of programs as envtest has it: what is in it is used by the control plane without nodes, and not built.
ASSETS = "KUBEBUILDER_ASSETS"
IN_ASSETS = ("kube-apiserver", "etcd")  # of these it must have both
SERVERS = (*IN_ASSETS, "kube-controller-manager", "kubectl")


def _stamp(version: str = versions.KUBERNETES) -> str:
    major, minor, _ = version.split(".")
    settings = {
        "k8s.io/component-base/version.gitVersion": f"v{version}",
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "k8s.io/component-base/version.gitTreeState": "clean",
        "k8s.io/client-go/pkg/version.gitVersion": f"v{version}",
    }
    return " ".join([SMALL, *(f"-X {name}={value}" for name, value in settings.items())])


def _go(name: str, *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    return run(
        str(toolchains.go()),
        *arguments,
        env={**ENVIRONMENT, **(env or {})},
        cwd=cwd,
        timeout=BUILD_LIMIT,
        log=cache.logs() / f"go-{name}.log",
    )


def _from_source(
    name: str, folder: str, flags: str, packages: tuple[str, ...], own: tuple[str, ...] = (".",), tags: str = ""
) -> Path:
    """Programs built inside one of our own modules, whose go.mod and go.sum pin every dependency.

    One alone is called `name`: Go would call it as its folder is, which for etcd is `server`. `own` are the files of
    that module that the programs are made of, `tags` build tags.
    """
    source = SOURCES / folder
    called = name if len(packages) == 1 else ""
    parts: tuple[cache.Part, ...] = (
        flags,
        *filter(None, [called, tags]),
        " ".join(packages),
        *(source / file for file in own),
    )

    def make(out: Path) -> None:
        how = ("-trimpath", "-tags", tags, "-ldflags", flags)
        _go(name, "build", *how, "-o", f"{out}/{called}", *packages, cwd=source)

    return cache.artifact(name, parts, make)


def _installed(name: str, package: str, version: str) -> Path:
    """A program whose own module says all there is to say."""

    def make(out: Path) -> None:
        _go(name, "install", "-trimpath", "-ldflags", SMALL, f"{package}@v{version}", env={"GOBIN": str(out)})

    return cache.artifact(name, (package, version), make) / name


def kubernetes() -> Path:
    """The folder with Kubernetes' seven programs."""
    packages = tuple(f"k8s.io/kubernetes/cmd/{program}" for program in KUBERNETES)
    return _from_source("kubernetes", "nodetools", _stamp(), packages, own=("go.mod", "go.sum"))


def node_tools() -> Path:
    """The folder with `podnet` and `crictl`."""
    return _from_source("nodetools", "nodetools", SMALL, ("./cmd/podnet", "./cmd/crictl"))


def etcd() -> Path:
    return _from_source("etcd", "etcd", SMALL, ("go.etcd.io/etcd/server/v3",)) / "etcd"


def server(name: str) -> Path:
    """One of `SERVERS`, for processes on this machine: of the folder `$KUBEBUILDER_ASSETS` if it is there, else built.

    Raises `ClusterError` where the folder has no kube-apiserver or no etcd.
    """
    folder = os.environ.get(ASSETS)
    if not folder:
        return etcd() if name == "etcd" else kubernetes() / name
    missing = [one for one in IN_ASSETS if not os.access(Path(folder) / one, os.X_OK)]
    if missing:
        raise ClusterError(
            f"{ASSETS}={folder}: it has no executable {' and no '.join(missing)}. Name a folder with "
            f"{' and '.join(IN_ASSETS)} (`setup-envtest use -p path` prints one), or unset it to build them."
        )
    program = Path(folder) / name
    if os.access(program, os.X_OK):
        return program
    return _from_source(name, "nodetools", _stamp(), (f"k8s.io/kubernetes/cmd/{name}",), ("go.mod", "go.sum")) / name


def api_server(version: str) -> Path:
    """The API server of the oldest or the newest Kubernetes that Everstep is for."""
    age = {versions.OLDEST_KUBERNETES: "oldest", versions.NEWEST_KUBERNETES: "newest"}[version]
    files = ("go.mod", "go.sum")
    name = f"kube-apiserver-{age}"
    return _from_source(name, age, _stamp(version), ("k8s.io/kubernetes/cmd/kube-apiserver",), files) / name


def newest_scheduler() -> Path:
    """The scheduler of the newest Kubernetes that Everstep is for."""
    program, files = "k8s.io/kubernetes/cmd/kube-scheduler", ("go.mod", "go.sum")
    stamp = _stamp(versions.NEWEST_KUBERNETES)
    name = "kube-scheduler-newest"
    return _from_source(name, "newest", stamp, (program,), files) / name


def control_plane() -> dict[str, Path]:
    """Where each of `SERVERS` is."""
    return {name: server(name) for name in SERVERS}


def coredns() -> Path:
    return _from_source("coredns", "coredns", SMALL, (".",)) / "coredns"


def pause() -> Path:
    return _from_source("pause", "pause", SMALL, (".",)) / "pause"


def runc_capfix() -> Path:
    return _from_source("runc-capfix", "runc-capfix", SMALL, (".",)) / "runc-capfix"


def kind() -> Path:
    return _installed("kind", "sigs.k8s.io/kind", versions.KIND)


def helm() -> Path:
    return _installed("helm", "helm.sh/helm/v4/cmd/helm", versions.HELM)


def versitygw() -> Path:
    return _installed("versitygw", "github.com/versity/versitygw/cmd/versitygw", versions.VERSITYGW)


def fake_gcs_server() -> Path:
    return _installed("fake-gcs-server", "github.com/fsouza/fake-gcs-server", versions.FAKE_GCS_SERVER)


def kube_router() -> Path:
    """The firewall that enforces NetworkPolicies, where a test starts it: ten minutes' build on a busy machine."""
    return _installed("kube-router", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router", versions.KUBE_ROUTER)


def prometheus() -> Path:
    """The folder with `prometheus` and `promtool`: without service discovery, and without the pages of its interface,
    which are no part of the module."""
    packages = tuple(f"github.com/prometheus/prometheus/cmd/{program}" for program in ("prometheus", "promtool"))
    return _from_source("prometheus", "prometheus", SMALL, packages, tags="remove_all_sd")


def monitoring_kinds() -> Path:
    """The folder with the CRDs of the Prometheus operator's kinds that the chart has. They are files of its module."""
    module, kinds = (
        "github.com/prometheus-operator/prometheus-operator",
        ("podmonitors", "prometheusrules", "servicemonitors"),
    )

    def make(out: Path) -> None:
        version = f"v{versions.PROMETHEUS_OPERATOR}"
        found = json.loads(_go("monitoring-kinds", "mod", "download", "-json", f"{module}@{version}", cwd=out))
        for kind in kinds:
            name = f"monitoring.coreos.com_{kind}.yaml"
            shutil.copyfile(Path(found["Dir"]) / "example/prometheus-operator-crd" / name, out / name)

    return cache.artifact("monitoring-kinds", (module, versions.PROMETHEUS_OPERATOR, *kinds), make)


def kueue() -> Path:
    """Kueue's controller, which admits workloads by quota."""
    return _installed("kueue", "sigs.k8s.io/kueue/cmd/kueue", versions.KUEUE)


def kueue_kinds() -> Path:
    """The folder with Kueue's CRDs. They are files of its module."""

    def make(out: Path) -> None:
        module = f"sigs.k8s.io/kueue@v{versions.KUEUE}"
        found = json.loads(_go("kueue-kinds", "mod", "download", "-json", module, cwd=out))
        for file in (Path(found["Dir"]) / "config/components/crd/bases").glob("*.yaml"):
            shutil.copyfile(file, out / file.name)

    return cache.artifact("kueue-kinds", (versions.KUEUE,), make)


def link_all() -> Path:
    """`<cache>/bin`, a folder of links to the current programs that users put in front of their PATH."""
    folder = cache.root() / "bin"
    folder.mkdir(exist_ok=True)
    kube = kubernetes()
    wanted = {program: kube / program for program in ("kubectl", "kube-apiserver", "kube-controller-manager")}
    wanted |= {"etcd": etcd(), "kind": kind(), "helm": helm(), "versitygw": versitygw()}
    with cache.lock("bin"):
        for name, program in wanted.items():
            link = folder / name
            if not link.is_symlink() or link.readlink() != program:
                fresh = folder / f".{name}.new"
                fresh.unlink(missing_ok=True)
                fresh.symlink_to(program)
                fresh.replace(link)
    return folder
