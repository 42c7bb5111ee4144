"""Which cluster, and whose credentials, a person's kubeconfigs name, by kubectl's rules.

The official client takes the last file's current context, needs one even if another is named, and sends requests
without credentials when a plug-in fails. So the files are read and plug-ins are run here, and the client is given one
context that is complete. Invariant: what is there and cannot be used is an error that names the file; it is never taken
for no kubeconfig.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from everstep.jobs.source import Misconfigured, NoCluster, Unreachable
from everstep.jobs.view import moment

PLUGIN_SECONDS = 60.0  # where nobody can answer it
SIGN_IN_SECONDS = 600.0  # where a person can
_LISTS = {"clusters": "cluster", "contexts": "context", "users": "user"}
_PATHS = {"clusters": ("certificate-authority",), "users": ("client-certificate", "client-key", "tokenFile")}
_READ_BY_CLIENT = ("gcp", "oidc")  # kinds of auth-provider
_IMPERSONATION = ("as", "as-uid", "as-groups", "as-user-extra")

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A context with its cluster and user. `credentials` runs the user's plug-in, and has what it answered, as the
    fields of a user, and when that expires (RFC 3339; empty if never); None without a plug-in."""

    name: str
    namespace: str
    cluster: Entry
    user: Entry
    credentials: Callable[[], tuple[dict[str, str], str]] | None

    def config(self, user: Entry) -> dict[str, Any]:
        """A kubeconfig with this context alone, and this user."""
        return {
            "current-context": self.name,
            "clusters": [{"name": "cluster", "cluster": dict(self.cluster)}],
            "users": [{"name": "user", "user": dict(user)}],
            "contexts": [{"name": self.name, "context": {"cluster": "cluster", "user": "user"}}],
        }


def choose(file: str | None, context: str | None) -> Chosen | None:
    """The context of this name, or the current one, of `file`, $KUBECONFIG or ~/.kube/config. None: there is no
    kubeconfig. Raises `Misconfigured`, and `NoCluster` if $KUBECONFIG names files that are not there."""
    named = os.environ.get("KUBECONFIG") or ""
    paths = [Path(part).expanduser() for part in (named if file is None else file).split(os.pathsep) if part]
    if file is None and not paths:
        paths = [Path("~/.kube/config").expanduser()]
    there = [path for path in paths if file is not None or _may_exist(path)]
    title = ", ".join(map(str, there or paths))
    if not there:
        if context is not None:
            raise Misconfigured(f"no context {context!r}: there is no kubeconfig {title}")
        if named:
            raise NoCluster(f"no cluster is configured: $KUBECONFIG names no file that is there: {named}")
        return None
    entries: dict[str, dict[str, Entry]] = {each: {} for each in _LISTS}
    current = ""
    for path in there:
        content = _read(path)
        current = current or str(content.get("current-context") or "")
        for each in _LISTS:
            for name, entry in _entries(path, content, each):
                entries[each].setdefault(name, entry)
    contexts = entries["contexts"]
    names = ", ".join(contexts) or "none"
    wanted = context if context is not None else current
    if not wanted and not contexts and file is None:
        return None  # as `kubectl config unset` leaves it
    if wanted not in contexts:
        if context is not None:
            raise Misconfigured(f"no context {context!r} in the kubeconfig {title}; it has {names}")
        problem = f"its current context {current!r} is none of them" if current else "no current context"
        raise Misconfigured(
            f"the kubeconfig {title} cannot be used: {problem}; it has {names}. Give --context, or "
            "kubectl config use-context NAME"
        )
    return _complete(title, wanted, contexts[wanted], entries)


def _complete(title: str, name: str, context: Entry, entries: Mapping[str, Mapping[str, Entry]]) -> Chosen:
    problem = f"the kubeconfig {title} cannot be used: context {name}"
    cluster = entries["clusters"].get(str(context.get("cluster")))
    if cluster is None:
        raise Misconfigured(f"{problem} names the cluster {context.get('cluster')!r}, which is not there")
    if not cluster.get("server"):
        raise Misconfigured(f"{problem}: its cluster {context.get('cluster')!r} has no server")
    user = entries["users"].get(str(context["user"])) if context.get("user") else {}
    if user is None:
        raise Misconfigured(f"{problem} names the user {context['user']!r}, who is not there")
    for entry, kind in ((cluster, "clusters"), (user, "users")):
        for field in _PATHS[kind]:
            if entry.get(field) and not entry.get(f"{field}-data"):  # which count before files
                try:
                    Path(entry[field]).open("rb").close()
                except OSError as e:
                    raise Misconfigured(f"{problem}: its {field} {entry[field]}: {e.strerror}") from None
    impersonation = [field for field in _IMPERSONATION if user.get(field)]
    if impersonation:
        raise Misconfigured(f"{problem}: {', '.join(impersonation)}: everstep cannot act as somebody else")
    provider = user.get("auth-provider")
    if isinstance(provider, dict) and provider.get("name") not in _READ_BY_CLIENT:
        raise Misconfigured(
            f"{problem}: credentials of the kind {provider.get('name')!r} are not supported: use its exec plug-in"
        )
    plugin = user.get("exec")
    if plugin is None or provider is not None or user.get("token") or user.get("tokenFile"):
        return Chosen(name, str(context.get("namespace") or "default"), cluster, user, None)
    if not (isinstance(plugin, dict) and plugin.get("command") and plugin.get("apiVersion")):
        raise Misconfigured(f"{problem}: the exec of its user needs a command and an apiVersion")
    return Chosen(
        name,
        str(context.get("namespace") or "default"),
        cluster,
        {key: value for key, value in user.items() if key != "exec"},
        lambda: _run(name, plugin, cluster),
    )


def _may_exist(path: Path) -> bool:
    """Whether it is there, or who looks is not allowed to know."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except yaml.MarkedYAMLError as e:  # its own text shows the file's lines, which may be credentials
        line = "" if e.problem_mark is None else f"line {e.problem_mark.line + 1}: "
        raise Misconfigured(f"the kubeconfig {path} cannot be read: {line}{e.problem}") from None
    except (OSError, ValueError, yaml.YAMLError) as e:
        problem = e.strerror if isinstance(e, OSError) else "it is no text in YAML"
        raise Misconfigured(f"the kubeconfig {path} cannot be read: {problem}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise Misconfigured(f"the kubeconfig {path} cannot be read: it is no mapping of clusters, contexts and users")
    return content


def _entries(path: Path, content: Mapping[str, Any], kind: str) -> list[tuple[str, Entry]]:
    """The named entries of a list, with absolute paths: those of a file are relative to it."""
    entries: list[tuple[str, Entry]] = []
    listed = content.get(kind) or []
    for each in listed if isinstance(listed, list) else [None]:
        name, value = (each.get("name"), each.get(_LISTS[kind]) or {}) if isinstance(each, dict) else (None, None)
        if not isinstance(value, dict) or not isinstance(name, str):
            raise Misconfigured(f"the kubeconfig {path} cannot be used: each of {kind} needs a name and a mapping")
        own = dict(value)
        for field in _PATHS.get(kind, ()):
            if own.get(field):
                own[field] = str(path.absolute().parent / str(own[field]))
        plugin = own.get("exec")
        if isinstance(plugin, dict) and os.sep in str(plugin.get("command") or ""):
            own["exec"] = {**plugin, "command": str(path.absolute().parent / plugin["command"])}
        entries.append((name, own))
    return entries


def _run(context: str, plugin: Mapping[str, Any], cluster: Entry) -> tuple[dict[str, str], str]:
    """What a plug-in answers: client.authentication.k8s.io. Raises `Unreachable`."""
    command = str(plugin["command"])
    what = f"context {context}: the credentials plug-in {command!r}"
    interactive = sys.stdin.isatty() and plugin.get("interactiveMode") != "Never"
    spec: dict[str, Any] = {"interactive": interactive}
    if plugin.get("provideClusterInfo"):
        spec["cluster"] = _cluster_info(cluster)
    info = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": spec}
    variables = {str(each["name"]): str(each["value"]) for each in plugin.get("env") or ()}
    seconds = SIGN_IN_SECONDS if interactive else PLUGIN_SECONDS
    try:
        done = subprocess.run(
            [command, *map(str, plugin.get("args") or ())],
            stdin=None if interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if interactive else subprocess.PIPE,
            env={**os.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            timeout=seconds,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{what} did not end within {seconds:.0f} s") from None
    except FileNotFoundError:
        hint = " ".join(str(plugin.get("installHint") or "put it on your PATH").split())
        raise Unreachable(f"{what} is not installed: {hint}") from None
    except OSError as e:
        raise Unreachable(f"{what} cannot be started: {e.strerror}") from e
    if done.returncode != 0:
        errors = (done.stderr or "").strip().splitlines()
        raise Unreachable(f"{what} ended with {done.returncode}{f': {errors[-1]}' if errors else ''}")
    try:
        status = json.loads(done.stdout).get("status") or {}
    except (ValueError, AttributeError):
        raise Unreachable(f"{what} printed no ExecCredential") from None
    expires = str(status.get("expirationTimestamp") or "")
    if status.get("token"):
        return {"token": str(status["token"])}, expires
    if status.get("clientCertificateData") and status.get("clientKeyData"):
        pair = {"client-certificate-data": "clientCertificateData", "client-key-data": "clientKeyData"}
        return {field: base64.b64encode(str(status[of]).encode()).decode() for field, of in pair.items()}, expires
    raise Unreachable(f"{what} answered with neither a token nor a certificate and its key")


def _cluster_info(cluster: Entry) -> dict[str, Any]:
    fields = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data", "proxy-url")
    info = {field: cluster[field] for field in fields if field in cluster}
    if cluster.get("certificate-authority"):
        content = Path(cluster["certificate-authority"]).read_bytes()
        info["certificate-authority-data"] = base64.b64encode(content).decode()
    for extension in cluster.get("extensions") or ():
        if extension.get("name") == "client.authentication.k8s.io/exec":
            info["config"] = extension.get("extension")
    return info


def expired(at: str) -> bool:
    """Whether this time, RFC 3339, has passed."""
    end = moment(at)
    return end is not None and end <= datetime.now(UTC)
