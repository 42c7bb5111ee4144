"""A kubeconfig, read by the official client: exec plug-ins, token files, client certificates, proxies.

Only `credentials` imports this module, when a kubeconfig is used: the package `kubernetes` is large, and a pod is
without it (ADR 0057).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import kube_config

from everstep_operator.kube.access import Access
from everstep_operator.kube.errors import CredentialsError

# The package calls itself typed, but its loaders carry no annotations.
_load_kube_config: Any = config.load_kube_config
_KubeConfigMerger: Any = kube_config.KubeConfigMerger


def context_and_server(files: str, context: str | None) -> tuple[str, str]:
    """The name of the context, the current one for None, and the URL of its server. Raises `CredentialsError` for a
    file or context that does not exist."""
    if not any(Path(path).expanduser().is_file() for path in files.split(os.pathsep)):
        raise CredentialsError(f"kubeconfig {files}: there is no such file")
    try:
        merged = _KubeConfigMerger(files)
        contexts = {c["name"]: c["context"] for c in merged.config["contexts"]}
        name = context or merged.config.value.get("current-context") or ""
        if name not in contexts:
            wanted = f"no context {name!r}" if name else "no current context; give --context"
            raise CredentialsError(f"kubeconfig {files}: {wanted}; it has {', '.join(contexts) or 'none'}")
        clusters = {c["name"]: c["cluster"] for c in merged.config["clusters"]}
        return name, str(clusters[contexts[name]["cluster"]]["server"])
    except CredentialsError:
        raise
    except Exception as error:  # its parsers raise errors of YAML, KeyError, and the client's own
        raise CredentialsError(f"kubeconfig {files}: cannot be read: {error}") from error


async def access(files: str, context: str | None) -> Access:
    """Load it; an exec plug-in is started. Raises `CredentialsError`."""
    configuration = Configuration()
    try:
        await _load_kube_config(
            config_file=files, context=context, client_configuration=configuration, persist_config=False
        )
        tls = RESTClientObject(configuration).ssl_context
    except Exception as error:
        # The loaders raise whatever their parsers raise (YAML, base64, KeyError). All of these mean the same here.
        raise CredentialsError(
            f"kubeconfig {files}: cannot be loaded: {error}; check that the files exist and are readable"
        ) from error

    async def authorization() -> str:
        token = (await configuration.auth_settings()).get("BearerToken")
        return "" if token is None else str(token["value"] or "")

    return Access(
        configuration.host,
        f"kubeconfig {files}",
        tls,
        authorization,
        configuration.proxy,
        configuration.proxy_headers,
        configuration.tls_server_name,
    )
