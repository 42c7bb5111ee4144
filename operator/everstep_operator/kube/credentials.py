"""Where the API server is and who we are: from a pod's service account or from a kubeconfig.

All of it (exec plug-ins, token files, client certificates, proxies) is the official client's work; this module decides
which source and makes its failures ours. Loading again yields fresh tokens and a fresh CA: a rotation needs no restart.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import incluster_config

from everstep_operator.kube.errors import CredentialsError

# The package calls itself typed, but its loaders carry no annotations.
_InClusterConfigLoader: Any = incluster_config.InClusterConfigLoader
_load_kube_config: Any = config.load_kube_config

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


def find_source(environ: Mapping[str, str]) -> Source:
    """$KUBECONFIG if set, else the pod's service account if there is one, else ~/.kube/config."""
    if environ.get("KUBECONFIG"):
        return KubeConfig(environ["KUBECONFIG"])
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if host and port and (SERVICE_ACCOUNT / "token").is_file():
        return InCluster(SERVICE_ACCOUNT, host, port)
    return KubeConfig(str(Path(environ.get("HOME", "~")).expanduser() / ".kube" / "config"))


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
        # The loaders raise whatever their parsers raise (YAML, base64, KeyError): all of it means the same here.
        raise CredentialsError(f"cannot load {source}: {error}; check that the files exist and are readable") from error
    return configuration
