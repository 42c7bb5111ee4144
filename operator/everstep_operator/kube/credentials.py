"""Chooses the API server and our credentials: those of a pod's service account, or those of a kubeconfig.

Loading again yields a fresh token and a fresh CA, so a rotation needs no restart. A pod needs no more than two files
(`service_account`). A kubeconfig is read by the official client (`kubeconfig`), which is imported then, and only then:
its package is an extra (ADR 0057).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from everstep_operator.kube.access import Access
from everstep_operator.kube.errors import CredentialsError
from everstep_operator.kube.service_account import access as pod_access

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class InCluster:
    """The files that the kubelet mounts, and the address of the `kubernetes` Service. An IPv6 address has no
    brackets."""

    directory: Path
    host: str
    port: str

    @property
    def server(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class KubeConfig:
    """A kubeconfig file, several separated by ":" as in $KUBECONFIG; `context=None` is its current one."""

    path: str
    context: str | None = None


Source: TypeAlias = InCluster | KubeConfig


def find_source(
    environ: Mapping[str, str],
    kubeconfig: str | None = None,
    context: str | None = None,
    service_account: Path = SERVICE_ACCOUNT,
) -> Source:
    """The cluster that was named by file or context, else the one of this pod.

    A kubeconfig is used only if a person names it: to look at a cluster with kubectl is not to ask that an operator act
    there. Raises `CredentialsError` if no cluster was named, or two were.
    """
    ambient = environ.get("KUBECONFIG")
    if kubeconfig is not None or context is not None:
        home = Path(environ.get("HOME", "~")).expanduser() / ".kube" / "config"
        return KubeConfig(kubeconfig or ambient or str(home), context)
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    token = service_account / "token"
    if not (host and port and token.is_file()):
        missing = f"this pod has no service account's token, {token}" if host and port else "this is no pod"
        raise CredentialsError(
            f"{missing}: name the cluster with --kubeconfig FILE, or --context NAME of "
            + ("$KUBECONFIG" if ambient else "~/.kube/config")
        )
    if ambient:
        raise CredentialsError(
            "this pod has a service account, and $KUBECONFIG names a cluster too: unset KUBECONFIG, or give "
            "--kubeconfig"
        )
    if not (port.isascii() and port.isdigit()):
        raise CredentialsError(f"KUBERNETES_SERVICE_PORT: {port!r} is no port: Kubernetes sets it to a number")
    return InCluster(service_account, host, port)


def own_namespace(source: InCluster) -> str:
    """The namespace of this pod. Raises `CredentialsError`."""
    try:
        return (source.directory / "namespace").read_text("utf-8").strip()
    except OSError as error:
        raise CredentialsError(f"the namespace of this pod cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Cluster:
    """The chosen source, to be shown to the person who chose it. `context` is empty for a pod's own cluster."""

    source: Source
    server: str
    context: str = ""

    def __str__(self) -> str:
        if isinstance(self.source, KubeConfig):
            return f"kubeconfig {self.source.path}, context {self.context}, server {self.server}"
        return f"this pod's service account, server {self.server}"


def look_up(source: Source) -> Cluster:
    """Which cluster that is, read from files alone. Raises `CredentialsError` for a file or context that does not
    exist, and for a kubeconfig where the official client is not installed."""
    if isinstance(source, InCluster):
        return Cluster(source, source.server)
    name, server = _kubeconfig(source).context_and_server(source.path, source.context)
    # The context is fixed: a running operator must not move when somebody makes another context the current one.
    return Cluster(KubeConfig(source.path, name), server, name)


async def load(source: Source) -> Access:
    """Read the source's files, now. Raises `CredentialsError`."""
    if isinstance(source, InCluster):
        return pod_access(source.server, source.directory)
    loaded: Access = await _kubeconfig(source).access(source.path, source.context)
    return loaded


def _kubeconfig(source: KubeConfig) -> Any:
    """The module that reads kubeconfigs."""
    try:
        return import_module("everstep_operator.kube.kubeconfig")
    except ModuleNotFoundError as error:
        raise CredentialsError(
            f"kubeconfig {source.path}: the package {error.name} reads kubeconfigs, and is not installed: "
            "pip install 'everstep-operator[kubeconfig]'; a pod's service account needs no package"
        ) from error
