"""A cluster's jobs, through the official client: it knows TLS, proxies, kinds of credentials, and a pod's own account.

Requests are JSON in and out. Every wait has a bound, and every failure is one line that says what to do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from everstep.contract import labels
from everstep.jobs import rerun
from everstep.jobs.source import JobError, Misconfigured, NoCluster, NoSuchJob, Unreachable, Where, migration
from everstep.jobs.view import EventRow, Object, View, event_row, event_time, of_objects

try:
    import urllib3
    from kubernetes import client, config
    from kubernetes.client.exceptions import ApiException

    from everstep.jobs import kubeconfig
except ModuleNotFoundError as e:
    raise NoCluster(f"the package {e.name} is missing: pip install 'everstep[cluster]'") from e

# The package calls itself typed, but these carry no annotations.
_new_client: Any = config.new_client_from_config_dict
_load_incluster: Any = config.load_incluster_config

CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 30.0
MAX_LINE = 1024 * 1024  # bytes of a log's line; a longer one is printed in pieces
RETRY_SECONDS, PAUSE_SECONDS = 30.0, 0.5  # for reads from a server that has answered before; between two of them
PAGE = 500  # objects of a list in one answer
EVENTS_API = "/apis/events.k8s.io/v1"
JOBS_API = f"/apis/{labels.GROUP}/{labels.VERSION}"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MERGE = {"Content-Type": "application/merge-patch+json"}


def connect(where: Where) -> Cluster:
    """The cluster of this kubeconfig and context; in a pod where neither is there, its own. Raises `NoCluster` where
    there is none, `Misconfigured` for a file or context that cannot be used, and `Unreachable` if its credentials
    plug-in fails."""
    chosen = kubeconfig.choose(where.kubeconfig, where.context)
    settings: Any = client.Configuration()
    settings.keep_alive = True  # a log may be silent for hours, and who forwards it forgets such connections
    if chosen is not None:
        return Cluster(
            _client(chosen, settings), where.namespace or chosen.namespace, f"context {chosen.name}", where.every
        )
    try:
        _load_incluster(settings)
        namespace = where.namespace or (SERVICE_ACCOUNT / "namespace").read_text("utf-8").strip()
    except (config.ConfigException, OSError) as e:
        raise NoCluster("no cluster is configured: give --kubeconfig FILE, or set KUBECONFIG") from e
    return Cluster(client.ApiClient(settings), namespace, "this pod's cluster", where.every)


def _client(chosen: kubeconfig.Chosen, settings: Any) -> Any:
    """The official client for this context. A plug-in's token is made anew when it has expired."""
    user, expires = chosen.user, ""
    if chosen.credentials is not None:
        own, expires = chosen.credentials()
        user = {**user, **own}
    try:
        api = _new_client(chosen.config(user), chosen.name, persist_config=False, client_configuration=settings)
    except Exception as e:  # its parsers raise errors of YAML, KeyError and TypeError
        problem = " ".join(str(e).split()) or type(e).__name__
        raise Misconfigured(f"context {chosen.name} of the kubeconfig cannot be used: {problem}") from e

    fields = ", ".join(field for field in user if field != "extensions")
    if fields and settings.host.startswith("https") and not (settings.api_key or settings.cert_file):
        raise Misconfigured(
            f"context {chosen.name} of the kubeconfig: the credentials of its user cannot be used: {fields}"
        )

    def renew(configuration: Any) -> None:
        nonlocal expires
        if chosen.credentials is not None and kubeconfig.expired(expires):
            fields, expires = chosen.credentials()
            if "token" in fields:
                configuration.api_key["BearerToken"] = f"Bearer {fields['token']}"

    if chosen.credentials is not None:
        settings.refresh_api_key_hook = renew
    return api


def operators(where: Where) -> list[str]:
    """The image of each operator on the cluster, with its namespace. Raises as `connect`, and `Unreachable`."""
    deployments = connect(where).deployments("app.kubernetes.io/name=everstep,app.kubernetes.io/component=operator")
    return [
        f"{container['image']} in namespace {each['metadata']['namespace']}"
        for each in deployments
        for container in each["spec"]["template"]["spec"]["containers"]
    ]


class _NoAnswer(Unreachable):
    """The server is away, or says that it is: it may be back at once."""


@dataclass(slots=True)
class Cluster:
    """A namespace of a cluster; `every`: lists are of all namespaces. A server that has answered once and then does not
    restarts, or another one takes over: reads wait `RETRY_SECONDS` for it."""

    api: Any
    namespace: str
    cluster: str
    every: bool = False
    answered: bool = False

    @property
    def title(self) -> str:
        return f"all namespaces of {self.cluster}" if self.every else f"namespace {self.namespace} of {self.cluster}"

    def jobs(self) -> list[View]:
        return [of_objects(job) for job in self._list(JOBS_API, labels.PLURAL, every=self.every)]

    def summary(self, job: str) -> View:
        return of_objects(self._job(job))

    def view(self, job: str) -> View:
        stored = self._job(job)
        return of_objects(stored, self._pods(stored), self._events(stored))

    def events(self, job: str) -> list[EventRow]:
        return [event_row(event) for event in self._events(self._job(job))]

    def objects(self, job: str) -> dict[str, Any]:
        stored = self._job(job)
        return {"trainingjob": stored, "pods": self._pods(stored)}

    def logs(
        self, job: str, pod: str, *, follow: bool, tail: int | None, silence: float | None = None
    ) -> Iterator[str]:
        del job  # a pod's name is enough
        query: dict[str, Any] = {"container": labels.WORKER_CONTAINER, "follow": follow}
        if tail is not None:
            query["tailLines"] = tail
        response = self._send(
            "GET",
            f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log",
            query,
            silence=silence if follow else ANSWER_SECONDS,
        )
        try:
            yield from lines(response.response.stream(decode_content=True))
        except urllib3.exceptions.HTTPError as e:
            raise Unreachable(f"the log of {pod} broke off: {e}") from e

    def create(self, job: Mapping[str, Any], files: tuple[str, Mapping[str, str]] | None) -> View:
        """Create a TrainingJob, and a ConfigMap with this name and these files, which is deleted with it. If the second
        is refused, the first is taken back. Raises `JobError`, and `Unreachable`."""
        name = str(job["metadata"]["name"])
        path = f"{JOBS_API}/namespaces/{self.namespace}/{labels.PLURAL}"
        stored: Object = self._call("POST", path, body=job)
        if files is not None:
            owner = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "name": name}
            meta = {
                "name": files[0],
                "labels": {labels.JOB: name},
                "ownerReferences": [{**owner, "uid": stored["metadata"]["uid"]}],
            }
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "immutable": True, "data": files[1]}
            try:
                self._call("POST", f"/api/v1/namespaces/{self.namespace}/configmaps", body=body)
            except (JobError, Unreachable):
                self._take_back(stored)
                raise
        return of_objects(stored)

    def _take_back(self, job: Object) -> None:
        name = job["metadata"]["name"]
        body = {"propagationPolicy": "Background", "preconditions": {"uid": job["metadata"]["uid"]}}
        try:
            self._call("DELETE", self._path(name), body=body)
        except (JobError, Unreachable) as e:
            raise Unreachable(f"job {name} waits for files that could not be sent, and cannot be deleted: {e}") from e

    def scale(self, job: str, replicas: int) -> None:
        self._patch(job, {"spec": {"replicas": replicas}}, "scale")

    def suspend(self, job: str, wanted: bool) -> None:
        self._patch(job, {"spec": {"suspend": wanted}})

    def rerun(self, job: str, url: str | None) -> tuple[Cluster, int]:
        body, number = rerun.patch(self._job(job), url)
        stored = self._call("PATCH", self._path(job), job=job, body=body)
        if (stored.get("spec") or {}).get("rerun") != number:
            raise JobError(f"{self.cluster} knows no spec.rerun: its operator is older than this program, upgrade it")
        return self, number

    def delete(self, job: str) -> None:
        self._call("DELETE", self._path(job), job=job, body={"propagationPolicy": "Background"})

    def kill(self, job: str, pod: str, *, delete: bool) -> str:
        stored = self._job(job)
        uid = next((each["metadata"]["uid"] for each in self._pods(stored) if each["metadata"]["name"] == pod), None)
        if uid is None:
            raise JobError(f"{job} has no pod {pod} any more")
        # Another job of this name may have a pod of this name by now.
        body = {"preconditions": {"uid": uid}, **({} if delete else {"gracePeriodSeconds": 0})}
        try:
            self._call("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{pod}", body=body)
        except _NoAnswer:  # it may have been done all the same
            left = {each["metadata"]["uid"]: each["metadata"] for each in self._pods(stored)}
            if uid in left and not left[uid].get("deletionTimestamp"):
                raise
        return f"pod {pod} deleted" if delete else f"pod {pod} deleted by force"

    def migrate(self, job: str, pod: str) -> None:
        stored = self._job(job)
        pods = {each["metadata"]["name"] for each in self._pods(stored)}
        self._patch(job, migration(stored["metadata"].get("annotations") or {}, pods, pod))

    def disturb(self, job: str, verb: str, **arguments: str) -> str:
        raise JobError(
            f"{verb.replace('-', ' ')}: only on this machine; a cluster's nodes and its operator serve others too"
        )

    def deployments(self, selector: str, *, every: bool = True) -> list[Object]:
        """Those with these labels, of all namespaces or of this one."""
        return self._list("/apis/apps/v1", "deployments", every=every, labelSelector=selector)

    def items(self, path: str) -> list[Object]:
        """Those of one page, at this path."""
        items: list[Object] = self._call("GET", path).get("items") or []
        return items

    def get(self, path: str) -> tuple[Object, Mapping[str, str]]:
        """An answer, and its headers."""
        response = self._send("GET", path, {})
        return self._decoded(response), response.headers

    def may(self, verb: str, group: str, resource: str, subresource: str) -> bool:
        """Whether this account has the right, in this namespace."""
        wanted = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource}
        body = {"spec": {"resourceAttributes": {**wanted, "subresource": subresource}}}
        answer = self._call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=body)
        return answer["status"].get("allowed") is True

    def _path(self, job: str) -> str:
        return f"{JOBS_API}/namespaces/{self.namespace}/{labels.PLURAL}/{job}"

    def _job(self, job: str) -> Object:
        stored: Object = self._call("GET", self._path(job), job=job)
        return stored

    def _patch(self, job: str, body: dict[str, Any], subresource: str = "") -> None:
        path = "/".join(part for part in (self._path(job), subresource) if part)
        self._call("PATCH", path, job=job, body=body)

    def _pods(self, job: Object) -> list[Object]:
        """Those of this very job: an earlier one of its name may still have pods that end."""
        return self._list("/api/v1", "pods", labelSelector=f"{labels.JOB_UID}={job['metadata']['uid']}")

    def _events(self, job: Object) -> list[Object]:
        selector = f"regarding.uid={job['metadata']['uid']}"
        return sorted(self._list(EVENTS_API, "events", fieldSelector=selector), key=event_time)

    def _list(self, api: str, plural: str, *, every: bool = False, **query: str) -> list[Object]:
        path = f"{api}/{plural}" if every else f"{api}/namespaces/{self.namespace}/{plural}"
        items: list[Object] = []
        page = ""
        while True:
            answer = self._call("GET", path, {**query, "limit": PAGE, **({"continue": page} if page else {})})
            items += answer.get("items") or ()
            page = (answer.get("metadata") or {}).get("continue") or ""
            if not page:
                return items

    def _call(
        self, method: str, path: str, query: dict[str, Any] | None = None, *, job: str = "", body: Any = None
    ) -> Any:
        return self._decoded(self._send(method, path, query or {}, job=job, body=body))

    def _decoded(self, response: Any) -> Any:
        try:
            return json.loads(response.read())
        except ValueError as e:
            raise Unreachable(f"what answers at {self.server} is no Kubernetes API server: {e}") from e
        except urllib3.exceptions.HTTPError as e:
            raise Unreachable(f"the answer of the cluster at {self.server} broke off: {e}") from e

    @property
    def server(self) -> str:
        return str(self.api.configuration.host)

    def _send(
        self,
        method: str,
        path: str,
        query: dict[str, Any],
        *,
        job: str = "",
        body: Any = None,
        silence: float | None = ANSWER_SECONDS,
    ) -> Any:
        """The answer may be silent for `silence` seconds; None: for any time."""
        until = time.monotonic() + (RETRY_SECONDS if method == "GET" and self.answered else 0.0)
        while True:
            try:
                response = self._send_once(method, path, query, job=job, body=body, silence=silence)
            except _NoAnswer:
                if time.monotonic() >= until:
                    raise
                time.sleep(PAUSE_SECONDS)
            else:
                self.answered = True
                return response

    def _send_once(
        self, method: str, path: str, query: dict[str, Any], *, job: str, body: Any, silence: float | None
    ) -> Any:
        headers = {"Accept": "application/json", **(MERGE if method == "PATCH" else {})}
        request = self.api.param_serialize(
            method, path, query_params=list(query.items()), header_params=headers, body=body,
            auth_settings=["BearerToken"],
        )  # fmt: skip
        timeout = (CONNECT_SECONDS, silence)
        try:
            response = self.api.call_api(*request, _request_timeout=timeout)
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as e:
            raise _NoAnswer(f"the cluster at {self.server} does not answer: {_cause(e)}") from e
        if response.status >= 300:
            self._refused(response, path, job)
        return response

    def _refused(self, response: Any, path: str, job: str) -> NoReturn:
        try:
            status = json.loads(response.read())
            message = str(status.get("message") or "").replace('Invalid value: "object": ', "")
        except ValueError:
            message = ""
        match response.status:
            case 404 if job and f'"{job}"' in message:
                try:
                    names = ", ".join(sorted(view.job for view in self.jobs())) or "none"
                except Unreachable:  # who may look at one job may not be allowed to list all
                    raise NoSuchJob(f"no job {job!r} in {self.title}") from None
                raise NoSuchJob(f"no job {job!r} in {self.title}; it has {names}")
            case 404 if message.startswith("namespaces "):
                raise JobError(f"{message}: there is no such namespace on {self.cluster}")
            case 404 if path.startswith(JOBS_API):
                raise Unreachable(f"{self.cluster} knows no {labels.KIND}: install the operator's chart there")
            case 401:
                raise Unreachable(f"{self.cluster} does not accept your credentials: log in to it again")
            case 403:
                raise Unreachable(f"you may not do that in {self.title}: {message}")
            case 400 | 404 | 409 | 422:  # 400: the log of a container that has not started
                raise JobError(message or f"{self.cluster} refuses it: {response.reason}")
            case 429 | 500 | 502 | 503 | 504 as code:
                raise _NoAnswer(f"{self.cluster} answers {code}: {message or response.reason}")
            case code:
                raise Unreachable(f"{self.cluster} answers {code}: {message or response.reason}")


def lines(parts: Iterable[bytes]) -> Iterator[str]:
    """The lines of a log that comes in parts. A carriage return ends one, too: a progress bar prints no other end."""
    rest: list[bytes] = []  # of a line whose end has not come
    size = 0
    returned = False  # the part before ended with a carriage return
    for part in parts:
        new = part.removeprefix(b"\n") if returned else part
        returned = new.endswith(b"\r") if new else returned and not part
        *whole, last = new.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            yield b"".join([*rest, line]).decode("utf-8", "replace")
            rest, size = [], 0
        rest.append(last)
        size += len(last)
        if size > MAX_LINE:
            yield b"".join(rest).decode("utf-8", "replace")
            rest, size = [], 0
    if size:
        yield b"".join(rest).decode("utf-8", "replace")


def _cause(error: BaseException) -> str:
    """The innermost reason, which is the only one that a person can act on."""
    reason = getattr(error, "reason", None)
    while isinstance(reason, BaseException):
        error, reason = reason, getattr(reason, "reason", None)
    text = str(reason or error).strip().splitlines()
    return text[-1].rpartition(": ")[2] if text else type(error).__name__
