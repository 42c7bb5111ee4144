"""The chart: what it renders is accepted by a real API server, grants the least, and refuses wrong values by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from everstep.contract import labels
from everstep_operator.settings import OperatorSettings

pytestmark = pytest.mark.apiserver

NAMESPACE = "everstep-chart"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:everstep"


def _objects(helm: Any, *flags: str) -> list[dict[str, Any]]:
    rendered = helm("template", "everstep", "-n", NAMESPACE, *flags).stdout
    return [found for found in yaml.safe_load_all(rendered) if found]


def wait_until(what: str, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, f"not within 30 s: {what}"
        time.sleep(0.2)


def _only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [o for o in objects if o["kind"] == kind]
    return found


@pytest.fixture(scope="module")
def granted(crd: Any, helm: Any) -> Iterator[Any]:
    """The control plane with the chart's roles and service account, and nothing else of it."""
    templates = ("serviceaccount", "rbac", "policy-rounds", "tests/installation")
    flags = [flag for name in templates for flag in ("-s", f"templates/{name}.yaml")]
    manifest = helm("template", "everstep", "-n", NAMESPACE, *flags).stdout
    crd.kubectl("create", "namespace", NAMESPACE)
    done = crd.kubectl("apply", "--server-side", "-f", "-", input=manifest)
    assert done.returncode == 0, done.stderr
    yield crd
    crd.kubectl("delete", "-f", "-", "--wait=false", input=manifest)
    crd.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


ALLOWED = [
    ("list", "trainingjobs.everstep.dev", "default"),
    ("watch", "trainingjobs.everstep.dev", "default"),
    ("delete", "trainingjobs.everstep.dev", "default"),
    ("patch", "trainingjobs.everstep.dev:status", "default"),
    ("create", "pods", "default"),
    ("delete", "pods", "default"),
    ("create", "services", "default"),
    ("delete", "services", "default"),
    ("list", "poddisruptionbudgets.policy", "default"),
    ("create", "poddisruptionbudgets.policy", "default"),
    ("delete", "poddisruptionbudgets.policy", "default"),
    ("watch", "networkpolicies.networking.k8s.io", "default"),
    ("create", "networkpolicies.networking.k8s.io", "default"),
    ("delete", "networkpolicies.networking.k8s.io", "default"),
    ("get", "configmaps", "default"),
    ("create", "configmaps", "default"),
    ("update", "configmaps", "default"),
    ("watch", "nodes", "default"),
    ("create", "events.events.k8s.io", "default"),
    ("list", "events.events.k8s.io", "default"),
    ("create", "tokenreviews.authentication.k8s.io", "default"),
    ("create", "leases.coordination.k8s.io", NAMESPACE),
    ("update", "leases.coordination.k8s.io/everstep-operator", NAMESPACE),
]
DENIED = [
    ("get", "nodes", "default"),
    ("get", "secrets", "default"),
    ("list", "secrets", NAMESPACE),
    ("list", "configmaps", "default"),
    ("watch", "events.events.k8s.io", "default"),
    ("delete", "configmaps", "default"),
    ("patch", "trainingjobs.everstep.dev", "default"),
    ("create", "trainingjobs.everstep.dev", "default"),
    ("update", "networkpolicies.networking.k8s.io", "default"),
    ("patch", "pods", "default"),
    ("create", "pods:exec", "default"),
    ("get", "pods:log", "default"),
    ("delete", "nodes", "default"),
    ("create", "serviceaccounts:token", "default"),
    ("impersonate", "users", "default"),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io", "default"),
    ("update", "leases.coordination.k8s.io/everstep-operator", "default"),
    ("update", "leases.coordination.k8s.io/other", NAMESPACE),
]


Request = tuple[str, str, str]


def _review(request: Request) -> dict[str, Any]:
    """`pods` is a resource, `pods:log` its subresource, `pods.group/a` the one named a."""
    verb, path, namespace = request
    path, _, name = path.partition("/")
    path, _, subresource = path.partition(":")
    resource, _, group = path.partition(".")
    attributes = {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "name": name}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": ACCOUNT, "resourceAttributes": {**attributes, "namespace": namespace}},
    }


@pytest.fixture(scope="module")
def answers(granted: Any) -> dict[Request, bool]:
    """The API server's judgement of every request, asked in one go."""
    requests = [*ALLOWED, *DENIED]
    reviews = yaml.safe_dump_all([_review(request) for request in requests])
    done = granted.kubectl("create", "-f", "-", "-o", "jsonpath={.status.allowed} ", input=reviews)
    assert done.returncode == 0, done.stderr
    return {request: answer == "true" for request, answer in zip(requests, done.stdout.split(), strict=True)}


@pytest.mark.long
@pytest.mark.parametrize("request_", ALLOWED, ids="-".join)
def test_operator_may_do_what_it_does(answers: dict[Request, bool], request_: Request) -> None:
    assert answers[request_]


@pytest.mark.parametrize("request_", DENIED, ids="-".join)
def test_operator_may_do_nothing_else(answers: dict[Request, bool], request_: Request) -> None:
    assert not answers[request_]


@pytest.fixture
def owner_uid(granted: Any) -> Iterator[str]:
    """Of a job that exists: what is owned by one that does not, Kubernetes takes away at once."""
    spec = {"replicas": 1, "template": {"spec": {"containers": [{"name": "worker", "image": "train"}]}}}
    job = {"apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "digits"}, "spec": spec}
    flags = ("-n", "default", "-o", "jsonpath={.metadata.uid}", "-f", "-")
    done = granted.kubectl("create", *flags, input=yaml.safe_dump(job))
    assert done.returncode == 0, done.stderr
    yield done.stdout
    granted.kubectl("delete", "tjob", "digits", "-n", "default", "--wait=false")


def _config_map(name: str, owner: str | None, uid: str) -> str:
    job = {"apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "name": owner, "uid": uid, "controller": True}
    owners = [] if owner is None else [job]
    metadata = {"name": name, "namespace": "default", "ownerReferences": owners}
    return yaml.safe_dump({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})


def test_operator_writes_the_config_maps_of_jobs_and_nobody_elses(granted: Any, owner_uid: str) -> None:
    def write(verb: str, name: str, owner: str | None, *flags: str) -> Any:
        return granted.kubectl(verb, *flags, "-f", "-", input=_config_map(name, owner, owner_uid))

    by_operator = ("--as", ACCOUNT)
    wait_until(
        "the policy is in force", lambda: write("create", "p", None, "--dry-run=server", *by_operator).returncode
    )
    assert write("create", "theirs", None).returncode == 0, "others are not asked"
    assert write("create", "taken-rounds", None).returncode == 0
    assert write("create", "digits-rounds", "digits", *by_operator).returncode == 0
    assert write("replace", "digits-rounds", "digits", *by_operator).returncode == 0
    for verb, name, owner, why in (
        ("create", "settings", "digits", "writes only ConfigMaps"),
        ("create", "other-rounds", None, "writes only ConfigMaps"),
        ("replace", "theirs", None, "writes only ConfigMaps"),
        ("replace", "taken-rounds", "taken", "takes over no ConfigMap"),
    ):
        done = write(verb, name, owner, *by_operator)
        assert done.returncode != 0
        assert why in done.stderr, done.stderr


def test_all_that_the_chart_renders_is_accepted_by_the_api_server(granted: Any, helm: Any) -> None:
    manifest = helm("template", "everstep", "-n", NAMESPACE).stdout
    flags = ("--dry-run=server", "--server-side", "--force-conflicts", "--validate=strict")
    done = granted.kubectl("apply", *flags, "-f", "-", input=manifest)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), "no warnings"


def test_default_chart_runs_two_operators_that_a_dead_node_cannot_hold(helm: Any) -> None:
    objects = _objects(helm)
    deployment = _only(objects, "Deployment")["spec"]
    pod = deployment["template"]["spec"]
    assert deployment["replicas"] == 2
    held = {t["key"]: t["tolerationSeconds"] for t in pod["tolerations"]}
    assert held == {"node.kubernetes.io/not-ready": 5, "node.kubernetes.io/unreachable": 5}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert _only(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_workers_report_to_the_service_of_the_release(helm: Any) -> None:
    objects = _objects(helm)
    service = _only(objects, "Service")["metadata"]
    (container,) = _only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert env["EVERSTEP_REPORT_URL"] == f"http://{service['name']}.{service['namespace']}.svc"


def test_operator_reads_the_settings_that_the_chart_writes(helm: Any) -> None:
    flags = (
        "--set",
        "leaseSeconds=9",
        "--set",
        "logLevel=debug",
        "--set-json",
        'policy.checkpointUrlPrefixes=["s3://a/"]',
    )
    (container,) = _only(_objects(helm, *flags), "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = OperatorSettings.from_env({v["name"]: v.get("value", "x") for v in container["env"]})
    assert (settings.lease_seconds, settings.log_level, settings.port) == (9, "DEBUG", 8080)
    assert settings.checkpoint_url_prefixes == ("s3://a/",)


def test_operators_port_is_for_workers_and_replicas_and_its_probes_for_whoever_is_named(crd: Any, helm: Any) -> None:
    prometheus = '[{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"monitoring"}}}]'
    objects = _objects(helm, "--set-json", f"networkPolicy.probesFrom={prometheus}")
    policy, (pod, ports) = _only(objects, "NetworkPolicy"), _pod_of(objects)
    policy["metadata"]["namespace"] = "default"
    done = crd.kubectl("create", "--dry-run=server", "-f", "-", input=yaml.safe_dump(policy))
    assert done.returncode == 0, done.stderr
    spec = policy["spec"]
    assert spec["podSelector"]["matchLabels"].items() <= pod.items()
    workers, probes = spec["ingress"]
    assert {p["port"] for rule in (workers, probes) for p in rule["ports"]} == ports
    every, own, test = workers["from"]
    (label,) = every["podSelector"]["matchExpressions"]
    assert every["namespaceSelector"] == {}
    assert label == {"key": labels.JOB_UID, "operator": "Exists"}
    assert own == {"podSelector": spec["podSelector"]}
    assert test["podSelector"]["matchLabels"].items() <= _only(objects, "Pod")["metadata"]["labels"].items()
    assert probes["from"][0]["namespaceSelector"]
    assert "from" not in _only(_objects(helm), "NetworkPolicy")["spec"]["ingress"][1]  # the kubelet is no pod
    off = _objects(helm, "--set", "networkPolicy.enabled=false")
    assert "NetworkPolicy" not in {o["kind"] for o in off}


@pytest.mark.parametrize(
    ("flags", "made"),
    [
        ((), True),
        (("--set", "networkPolicy.jobs=false"), False),
        (("--set", "networkPolicy.enabled=false"), False),
    ],
)
def test_jobs_have_policies_and_the_operator_the_right_to_them_where_the_chart_says_so(
    helm: Any, flags: tuple[str, ...], made: bool
) -> None:
    objects = _objects(helm, *flags)
    (container,) = _only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = OperatorSettings.from_env({v["name"]: v.get("value", "x") for v in container["env"]})
    granted = {r for rule in _only(objects, "ClusterRole")["rules"] for r in rule.get("resources", ())}
    assert (settings.job_network_policies, "networkpolicies" in granted) == (made, made)


def test_operator_makes_pod_groups_of_the_schedulers_that_the_chart_lists_and_has_the_right_to_no_others(
    helm: Any,
) -> None:
    def groups(*flags: str) -> tuple[tuple[str, ...], list[list[str]]]:
        objects = _objects(helm, *flags)
        (container,) = _only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
        settings = OperatorSettings.from_env({v["name"]: v.get("value", "x") for v in container["env"]})
        rules = [rule for rule in _only(objects, "ClusterRole")["rules"] if rule.get("resources") == ["podgroups"]]
        return settings.pod_groups, [rule["apiGroups"] for rule in rules]

    assert groups() == ((), [])
    assert groups("--set", "podGroups={Volcano,Kubernetes}") == (
        ("Volcano", "Kubernetes"), [["scheduling.volcano.sh"], ["scheduling.k8s.io"]],
    )  # fmt: skip
    assert groups("--set", "podGroups={Coscheduling}") == (("Coscheduling",), [["scheduling.x-k8s.io"]])


@pytest.mark.parametrize("on", [False, True])
def test_operator_has_rights_to_workloads_and_kueue_to_jobs_where_the_chart_says_so(helm: Any, on: bool) -> None:
    objects = _objects(helm, *(("--set", "kueue.enabled=true") if on else ()))
    (container,) = _only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = OperatorSettings.from_env({v["name"]: v.get("value", "x") for v in container["env"]})
    assert settings.kueue is on
    roles = {o["metadata"]["name"]: o for o in objects if o["kind"] == "ClusterRole"}
    of_kueue = [rule for rule in roles["everstep"]["rules"] if rule.get("apiGroups") == ["kueue.x-k8s.io"]]
    granted = {(resource, verb) for rule in of_kueue for resource in rule["resources"] for verb in rule["verbs"]}
    assert (("workloads/status", "patch") in granted, ("resourceflavors", "watch") in granted) == (on, on)
    assert ("everstep-kueue" in roles) is on
    if on:
        (binding,) = [o for o in objects if o["metadata"]["name"] == "everstep-kueue" and o["kind"] != "ClusterRole"]
        # An upgrade would take it for the binding of another operator.
        assert binding["metadata"]["labels"]["app.kubernetes.io/component"] == "kueue"
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "kueue-controller-manager", "namespace": "kueue-system"}
        ]


@pytest.mark.parametrize("on", [False, True])
def test_page_has_its_port_service_rule_and_right_where_the_chart_says_so_and_nowhere_else(helm: Any, on: bool) -> None:
    flags = ("--set", "page.enabled=true") if on else ()
    objects = _objects(helm, *flags)
    (container,) = _only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = OperatorSettings.from_env({v["name"]: v.get("value", "x") for v in container["env"]})
    rules = [
        rule for rule in _only(objects, "ClusterRole")["rules"] if rule.get("resources") == ["subjectaccessreviews"]
    ]
    services = sorted(o["metadata"]["name"] for o in objects if o["kind"] == "Service")
    ports = [rule["ports"][0]["port"] for rule in _only(objects, "NetworkPolicy")["spec"]["ingress"]]
    assert settings.page_port == (8082 if on else None)
    assert [rule["verbs"] for rule in rules] == ([["create"]] if on else [])
    assert services == (["everstep", "everstep-page"] if on else ["everstep"])
    assert ports == ["http", "probes", *(["page"] if on else [])]
    assert {p["name"] for p in container["ports"]} == {"http", "probes", *(["page"] if on else [])}
    assert "Ingress" not in {o["kind"] for o in objects}


def test_ingress_of_the_page_is_accepted_and_needs_a_host(crd: Any, helm: Any) -> None:
    flags = [("page.enabled", "true"), ("page.ingress.enabled", "true"), ("page.ingress.host", "jobs.example.com"),
             ("page.ingress.tlsSecret", "jobs-tls"), ("page.ingress.className", "nginx")]  # fmt: skip
    values = [part for name, value in flags for part in ("--set", f"{name}={value}")]
    objects = [o for o in _objects(helm, *values) if o["metadata"]["name"] == "everstep-page"]
    assert {o["kind"] for o in objects} == {"Service", "Ingress"}
    crd.kubectl("create", "namespace", NAMESPACE)
    done = crd.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", input=yaml.safe_dump_all(objects))
    assert done.returncode == 0, done.stderr
    refused = helm("template", "everstep", *values[:4], expect_failure=True)
    assert "page.ingress.host" in refused.stderr


def _pod_of(objects: list[dict[str, Any]]) -> tuple[dict[str, str], set[str]]:
    """The labels of the operator's pods, and the names of their ports."""
    template = _only(objects, "Deployment")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    return template["metadata"]["labels"], {port["name"] for port in container["ports"]}


def test_values_for_names_images_and_pods_are_used(helm: Any) -> None:
    digest = f"sha256:{'0a' * 32}"
    values = [
        f"image.digest={digest}", "podLabels.team=ml", "extraEnv[0].name=HTTPS_PROXY", "extraEnv[0].value=http://proxy",
        "topologySpreadConstraints[0].maxSkew=2", "topologySpreadConstraints[0].topologyKey=zone",
        "topologySpreadConstraints[0].whenUnsatisfiable=ScheduleAnyway", "extraObjects[0].apiVersion=v1",
        "extraObjects[0].kind=ConfigMap", "extraObjects[0].metadata.name=more",
    ]  # fmt: skip
    template = ("--set-literal", "extraObjects[0].data.where={{ .Release.Namespace }}")
    objects = _objects(helm, *(part for value in values for part in ("--set", value)), *template)
    deployment = _only(objects, "Deployment")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["image"] == f"everstep/operator@{digest}"
    assert container["env"][-1] == {"name": "HTTPS_PROXY", "value": "http://proxy"}
    assert pod["metadata"]["labels"].items() >= {"team": "ml", **deployment["spec"]["selector"]["matchLabels"]}.items()
    assert pod["spec"]["topologySpreadConstraints"] == [
        {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ]
    assert _only(objects, "ConfigMap")["data"] == {"where": NAMESPACE}


@pytest.mark.parametrize(
    ("value", "begins"),
    [("nameOverride=trainer", "everstep-trainer"), ("fullnameOverride=mine", "mine"), ("nameOverride=", "everstep")],
)
def test_names_of_all_objects_follow_the_values_and_the_label_of_the_operator_does_not(
    helm: Any, value: str, begins: str
) -> None:
    metrics = ("prometheusRule", "podMonitor", "dashboard")
    objects = _objects(helm, "--set", value, *(p for m in metrics for p in ("--set", f"metrics.{m}.enabled=true")))
    named = {o["metadata"]["name"] for o in objects if o["kind"] != "CustomResourceDefinition"}
    assert {name for name in named if name != begins and not name.startswith(f"{begins}-")} == set()
    for one in objects:
        labels_ = one["metadata"].get("labels", {})
        if one["kind"] != "CustomResourceDefinition":
            assert labels_["app.kubernetes.io/name"] == "everstep", "`everstep doctor --cluster` looks for it"
            assert {"instance", "version", "component", "part-of", "managed-by"} <= {
                name.partition("/")[2] for name in labels_
            }
    env = {
        v["name"]: v.get("value")
        for v in _only(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert env["EVERSTEP_REPORT_URL"] == f"http://{_only(objects, 'Service')['metadata']['name']}.{NAMESPACE}.svc"


def test_one_replica_has_no_disruption_budget_that_blocks_drains(helm: Any) -> None:
    assert "PodDisruptionBudget" not in {o["kind"] for o in _objects(helm, "--set", "replicas=1")}


def test_uninstall_keeps_the_crd_and_its_jobs(helm: Any) -> None:
    crd = _only(_objects(helm), "CustomResourceDefinition")
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert "CustomResourceDefinition" not in {o["kind"] for o in _objects(helm, "--set", "crds.install=false")}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("replicas=0", "/replicas"),
        ("replicas=two", "/replicas"),
        ("leaseSeconds=1", "/leaseSeconds"),
        ("logLevel=loud", "/logLevel"),
        ("image.repository=", "/image/repository"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("polcy.enabled=false", "polcy"),
        ("networkPolicy.alsoFrom[0].podSelektor.x=y", "podSelektor"),
        ("policy.enabeld=false", "enabeld"),
        ("policy.checkpointUrlPrefixes={s3://team}", "/policy/checkpointUrlPrefixes/0"),
        ("policy.checkpointUrlPrefixes={/data}", "/policy/checkpointUrlPrefixes/0"),
        ("policy.allowedCapabilities={sys_admin}", "/policy/allowedCapabilities/0"),
        ("policy.allowedServiceAccounts={a'b}", "/policy/allowedServiceAccounts/0"),
        ("resources.limit.memory=1Gi", "'limit' not allowed"),
        ("tolerations[0].opertor=Exists", "'opertor' not allowed"),
        ("affinity.nodeAfinity.x=1", "'nodeAfinity' not allowed"),
        ("affinity.podAffinity.requiredDuringScheduling=1", "'requiredDuringScheduling' not allowed"),
        ("fullnameOverride=Mine", "/fullnameOverride"),
        ("image.digest=latest", "/image/digest"),
        ("podLabels.app\\.kubernetes\\.io/name=x", "/podLabels"),
        ("extraEnv[0].nam=x", "/extraEnv/0"),
        ("extraObjects[0].kind=ConfigMap", "/extraObjects/0"),
        ("topologySpreadConstraints[0].maxSkew=1", "/topologySpreadConstraints/0"),
        ("metrics.podmonitor.enabled=true", "'podmonitor' not allowed"),
        ("metrics.podMonitor.interval=often", "/metrics/podMonitor/interval"),
        ("metrics.prometheusRule.jobStuckSeconds=0", "/metrics/prometheusRule/jobStuckSeconds"),
        ("metrics.prometheusRule.runbookUrl=https://wiki/", "/metrics/prometheusRule/runbookUrl"),
    ],
)
def test_wrong_value_is_refused_by_its_name(helm: Any, value: str, named: str) -> None:
    done = helm("template", "everstep", "--set", value, expect_failure=True)
    assert named in done.stderr


def test_guard_of_the_operators_own_writes_does_not_hang_on_the_policy_for_jobs(helm: Any) -> None:
    def policies(*flags: str) -> set[str]:
        found = (o for o in _objects(helm, *flags) if o["kind"] == "ValidatingAdmissionPolicy")
        return {o["metadata"]["name"] for o in found}

    assert policies() == {"everstep-trainingjobs", "everstep-rounds"}
    assert policies("--set", "policy.enabled=false") == {"everstep-rounds"}
    assert policies("--set", "operatorPolicy.enabled=false") == {"everstep-trainingjobs"}


@pytest.mark.long
def test_one_schedulable_node_beside_tainted_ones_takes_both_replicas(crd: Any, helm: Any) -> None:
    """The scheduler would leave the second replica pending for ever if tainted nodes counted as places for it."""
    control_plane = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    down = {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}
    made: list[str] = []

    def node(name: str, *taints: dict[str, str]) -> None:
        made.append(name)
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"taints": list(taints)}}
        done = crd.kubectl("create", "-f", "-", input=yaml.safe_dump(body))
        assert done.returncode == 0, done.stderr

    def counted(*flags: str) -> str:
        # The release whose roles the other tests have made: the chart refuses a second one.
        release = ("template", "everstep", "-n", NAMESPACE, "--set", "crds.install=false", "--take-ownership")
        asked = (*release, "--dry-run=server", "--kubeconfig", str(crd.kubeconfig), *flags)
        rendered = [o for o in yaml.safe_load_all(helm(*asked).stdout) if o]
        (constraint,) = _only(rendered, "Deployment")["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert constraint["whenUnsatisfiable"] == "DoNotSchedule"
        return str(constraint["nodeTaintsPolicy"])

    try:
        node("spread-tainted", control_plane)
        node("spread-free")
        assert counted() == "Honor"
        assert counted("--set", "nodeSpread=allNodes") == "Ignore"
        node("spread-down", down)
        assert counted() == "Ignore"
        assert counted("--set", "nodeSpread=untaintedNodes") == "Honor"
    finally:
        crd.kubectl("delete", "node", *made)
