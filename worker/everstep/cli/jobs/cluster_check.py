"""What a cluster needs for jobs, looked at from outside: `everstep doctor --cluster`. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from everstep.contract import labels
from everstep.jobs.cluster import JOBS_API, Cluster
from everstep.jobs.source import JobError, Unreachable
from everstep.jobs.view import Object, condition, moment

OLDEST = (1, 30)  # of Kubernetes
CLOCK_SECONDS = 5.0  # between this machine and the API server: times in answers have whole seconds
LEASE_SECONDS = 60.0  # since the leader's last renewal; its term is shorter
LEASES_API = "/apis/coordination.k8s.io/v1"
WATCHED = "EVERSTEP_WATCH_NAMESPACES"  # of an operator: whose jobs it runs; empty or not set: all
OPERATOR = "app.kubernetes.io/name=everstep,app.kubernetes.io/component=operator"
# What the commands do: verb, group, resource, subresource.
RIGHTS = (
    ("create", labels.GROUP, labels.PLURAL, ""),
    ("get", labels.GROUP, labels.PLURAL, ""),
    ("list", labels.GROUP, labels.PLURAL, ""),
    ("patch", labels.GROUP, labels.PLURAL, ""),
    ("patch", labels.GROUP, labels.PLURAL, "scale"),
    ("delete", labels.GROUP, labels.PLURAL, ""),
    ("list", "", "pods", ""),
    ("delete", "", "pods", ""),
    ("get", "", "pods", "log"),
    ("list", "events.k8s.io", "events", ""),
    ("create", "", "configmaps", ""),  # the programs that the Python client sends
)
# What a team may leave out on purpose, and which commands it costs.
OPTIONAL = {("create", "", "pods", "exec"): "everstep stacks and profile"}


@dataclass(frozen=True, slots=True)
class Finding:
    """`good` is None where it cannot be known."""

    check: str
    good: bool | None
    text: str


def look(cluster: Cluster) -> Iterator[Finding]:
    """All checks, each with one finding. Raises `Unreachable` only if the API server does not answer at all."""
    yield _version(cluster)
    for name, check in CHECKS.items():
        try:
            good, text = check(cluster)
        except (Unreachable, JobError) as e:
            good, text = None, str(e)
        yield Finding(name, good, text)


def _version(cluster: Cluster) -> Finding:
    answer, headers = cluster.get("/version")
    digits = [int("".join(filter(str.isdigit, str(answer[part])))) for part in ("major", "minor")]
    text = f"{answer['gitVersion']} at {cluster.server}"
    date = headers.get("Date")
    if date:
        apart = abs((parsedate_to_datetime(date) - datetime.now(UTC)).total_seconds())
        if apart > CLOCK_SECONDS:
            return Finding("API server", False, f"{text}; its clock and this machine's are {apart:.0f} s apart")
    good = tuple(digits) >= OLDEST
    return Finding("API server", good, text if good else f"{text}: {OLDEST[0]}.{OLDEST[1]} or newer is needed")


def _crd(cluster: Cluster) -> tuple[bool, str]:
    try:
        cluster.get(f"{JOBS_API}/namespaces/{cluster.namespace}/{labels.PLURAL}?limit=1")
    except Unreachable as e:
        if "knows no" in str(e):
            return False, f"{e}: helm install everstep charts/everstep -n everstep-system --create-namespace"
        raise
    return True, f"{labels.KIND} {labels.API_VERSION} is served"


def _operators(cluster: Cluster) -> list[Object]:
    """The Deployments of operators; those of this namespace where the account may not look further."""
    try:
        return cluster.deployments(OPERATOR)
    except Unreachable:
        if not (here := cluster.deployments(OPERATOR, every=False)):
            raise  # others may be there
        return here


def _setting(deployment: Object, name: str) -> str:
    """The value of a variable of the operator's container; empty without one."""
    containers = deployment["spec"]["template"]["spec"]["containers"]
    variables = (each for container in containers for each in container.get("env") or ())
    return next((str(each.get("value") or "") for each in variables if each.get("name") == name), "")


def _acts_here(cluster: Cluster, deployment: Object) -> bool:
    watched = _setting(deployment, WATCHED)
    return not watched or cluster.namespace in watched.split(",")


def _operator(cluster: Cluster) -> tuple[bool, str]:
    deployments = _operators(cluster)
    if not deployments:
        return False, "no operator is installed: jobs are stored, and nothing happens to them"
    texts, good = [], True
    for each in deployments:
        meta = each["metadata"]
        name = f"{meta['namespace']}/{meta['name']}"
        if not _acts_here(cluster, each):
            texts.append(f"{name} is for {_setting(each, WATCHED)} alone")
            continue
        ready, wanted = int(each["status"].get("readyReplicas", 0)), int(each["spec"].get("replicas", 1))
        texts.append(f"{name}: {ready} of {wanted} ready")
        good = good and ready > 0
        if ready == 0:
            reason = condition(each["status"], "Available").get("message", "")
            texts[-1] += f" ({reason}); kubectl -n {meta['namespace']} describe deploy {meta['name']}"
        if _setting(each, "EVERSTEP_READ_NODES") == "false":
            texts[-1] += ", reads no nodes (chart value clusterRole.readNodes): a lost one is noticed after minutes"
    acting = sum(_acts_here(cluster, each) for each in deployments)
    if acting == 0:
        texts.append(f"none acts on jobs of {cluster.namespace}: add it to watchNamespaces of one of their releases")
    if acting > 1:
        texts.append(f"each acts on jobs of {cluster.namespace}, and undoes the others' work: uninstall all but one")
    return good and acting == 1, "; ".join(texts)


def _leader(cluster: Cluster) -> tuple[bool | None, str]:
    namespaces = {each["metadata"]["namespace"] for each in _operators(cluster) if _acts_here(cluster, each)}
    for namespace in sorted(namespaces):
        for lease in cluster.items(f"{LEASES_API}/namespaces/{namespace}/leases"):
            spec = lease.get("spec") or {}
            at = moment(str(spec.get("renewTime") or ""))
            if not lease["metadata"]["name"].startswith("everstep") or at is None:
                continue
            ago = (datetime.now(UTC) - at).total_seconds()
            holder = spec.get("holderIdentity") or "nobody"
            return bool(spec.get("holderIdentity")) and ago < LEASE_SECONDS, f"{holder}, renewed {ago:.0f} s ago"
    return (None, "no operator, so no leader") if not namespaces else (False, "nobody has led yet")


def _rights(cluster: Cluster) -> tuple[bool, str]:
    lacking = [_words(right) for right in RIGHTS if not cluster.may(*right)]
    text = f"you may not {', '.join(lacking)}" if lacking else "all that the commands need"
    costs = [
        f"; without {_words(right)} the cluster refuses {commands}"
        for right, commands in OPTIONAL.items()
        if not cluster.may(*right)
    ]
    return not lacking, f"{text} in namespace {cluster.namespace}{''.join(costs)}"


def _words(right: tuple[str, str, str, str]) -> str:
    verb, _, resource, subresource = right
    return f"{verb} {'/'.join(filter(None, (resource, subresource)))}"


CHECKS: dict[str, Callable[[Cluster], tuple[bool | None, str]]] = {
    "TrainingJob": _crd,
    "operator": _operator,
    "leader": _leader,
    "your rights": _rights,
}
