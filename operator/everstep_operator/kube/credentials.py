"""Finds the API server and our credentials, from a pod's service account or from a kubeconfig.

The official client does the work (exec plug-ins, token files, client certificates, proxies). This module chooses the
source, and turns failures into our errors. Loading again yields fresh tokens and a fresh CA, so a rotation needs no
restart.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import incluster_config, kube_config

from everstep_operator.kube.errors import CredentialsError

# The package calls itself typed, but its loaders carry no annotations.
_InClusterConfigLoader: Any = incluster_config.InClusterConfigLoader
_load_kube_config: Any = config.load_kube_config
_KubeConfigMerger: Any = kube_config.KubeConfigMerger

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class InCluster:
    """The files that the kubelet mounts, and the address `host:port` of the `kubernetes` Service."""

    directory: Path
    host: str
    port: str


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
    if not (host and port and (service_account / "token").is_file()):
        raise CredentialsError(
            "this is no pod with a service account: name the cluster with --kubeconfig FILE, or --context NAME of "
            + ("$KUBECONFIG" if ambient else "~/.kube/config")
        )
    if ambient:
        raise CredentialsError(
            "this pod has a service account, and $KUBECONFIG names a cluster too: unset KUBECONFIG, or give "
            "--kubeconfig"
        )
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
    exist."""
    if isinstance(source, InCluster):
        host = f"[{source.host}]" if ":" in source.host else source.host  # an IPv6 address
        return Cluster(source, f"https://{host}:{source.port}")
    if not any(Path(path).expanduser().is_file() for path in source.path.split(os.pathsep)):
        raise CredentialsError(f"kubeconfig {source.path}: there is no such file")
    try:
        merged = _KubeConfigMerger(source.path)
        contexts = {c["name"]: c["context"] for c in merged.config["contexts"]}
        name = source.context or merged.config.value.get("current-context") or ""
        if name not in contexts:
            wanted = f"no context {name!r}" if name else "no current context; give --context"
            raise CredentialsError(f"kubeconfig {source.path}: {wanted}; it has {', '.join(contexts) or 'none'}")
        clusters = {c["name"]: c["cluster"] for c in merged.config["clusters"]}
        server = str(clusters[contexts[name]["cluster"]]["server"])
    except CredentialsError:
        raise
    except Exception as error:  # its parsers raise errors of YAML, KeyError, and the client's own
        raise CredentialsError(f"kubeconfig {source.path}: cannot be read: {error}") from error
    # The context is fixed: a running operator must not move when somebody makes another context the current one.
    return Cluster(KubeConfig(source.path, name), server, name)


async def load(source: Source, connections: int) -> Any:
    """A client configuration with at most `connections` connections. Raises `CredentialsError`."""
    configuration = Configuration(connection_pool_maxsize=connections)
    try:
        match source:
            case InCluster(directory, host, port):
                _InClusterConfigLoader(
                    token_filename=str(directory / "token"),
                    cert_filename=str(directory / "ca.crt"),
                    environ={**os.environ, "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port},
                ).load_and_set(configuration)
            case KubeConfig(path, context):
                await _load_kube_config(
                    config_file=path, context=context, client_configuration=configuration, persist_config=False
                )
    except Exception as error:
        # The loaders raise whatever their parsers raise (YAML, base64, KeyError). All of these mean the same here.
        raise CredentialsError(f"cannot load {source}: {error}; check that the files exist and are readable") from error
    return configuration
