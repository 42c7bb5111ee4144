"""What the chart's ValidatingAdmissionPolicy refuses, asked of a real API server: failure cases 6, 9 and 11.

The policy is rendered by helm, as an installation gets it, and removed again: it is for the whole cluster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.apiserver

OPERATOR_NAMESPACE = "everstep-system"
CONTAINER = {"name": "worker", "image": "train:1", "command": ["torchrun", "train.py"]}
GOOD_URL = {"checkpoint.url": "s3://bucket/digits"}


def _pod(**fields: Any) -> dict[str, Any]:
    return {f"template.spec.{name}": value for name, value in fields.items()}


def _worker(**fields: Any) -> dict[str, Any]:
    return _pod(containers=[{**CONTAINER, **fields}])


def _secured(**fields: Any) -> dict[str, Any]:
    return _worker(securityContext=fields)


def _url(url: str) -> dict[str, Any]:
    return {"checkpoint.url": url}


PRIVILEGED = {"name": "setup", "image": "x", "securityContext": {"privileged": True}}
SIDE_CAR = {"name": "logs", "image": "x"}

# name of the case -> (changes, what the message names)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "case_09_host_network": (_pod(hostNetwork=True), "must not be set (chart value policy.allowHostNetwork)"),
    "pod_group_of_a_scheduler_that_is_not_listed": (
        {"scheduling": {"podGroup": {"scheduler": "Volcano"}}},
        "spec.scheduling.podGroup.scheduler Volcano: this installation makes PodGroups of no scheduler (chart value "
        "podGroups)",
    ),
    "volume_claims": (
        {
            "volumeClaimTemplates": [
                {
                    "metadata": {"name": "cache"},
                    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
                }
            ]
        },
        "spec.volumeClaimTemplates must not be set (chart value volumeClaims.enabled)",
    ),
    "case_09_host_network_as_text": (_pod(hostNetwork="true"), "spec.template.spec.hostNetwork"),
    "case_09_host_pid": (_pod(hostPID=True), "spec.template.spec.hostPID"),
    "case_09_host_ipc": (_pod(hostIPC=True), "spec.template.spec.hostIPC"),
    "case_09_host_path": (
        _pod(volumes=[{"name": "root", "hostPath": {"path": "/"}}]),
        "hostPath is not allowed, remove it from root",
    ),
    "case_09_host_path_behind_a_good_volume": (
        _pod(volumes=[{"name": "tmp", "emptyDir": {}}, {"name": "sock", "hostPath": {"path": "/run/x.sock"}}]),
        "remove it from sock",
    ),
    "case_09_privileged_worker": (
        _secured(privileged=True),
        "securityContext.privileged is not allowed, remove it from worker",
    ),
    "case_09_privileged_side_car": (_pod(containers=[CONTAINER, PRIVILEGED]), "remove it from setup"),
    "case_09_privileged_init_container": (_pod(initContainers=[PRIVILEGED]), "remove it from setup"),
    "case_09_ephemeral_container": (
        _pod(ephemeralContainers=[{"name": "debug"}]),
        "spec.template.spec.ephemeralContainers",
    ),
    "case_09_capability_sys_admin": (_secured(capabilities={"add": ["SYS_ADMIN"]}), "securityContext.capabilities.add"),
    "case_09_capability_all": (_secured(capabilities={"add": ["ALL"]}), "securityContext.capabilities.add"),
    "case_09_capability_of_init_container": (
        _pod(initContainers=[{**SIDE_CAR, "securityContext": {"capabilities": {"add": ["NET_RAW"]}}}]),
        "securityContext.capabilities.add",
    ),
    "case_09_proc_mount": (_secured(procMount="Unmasked"), "securityContext.procMount"),
    "case_09_seccomp_off_in_container": (_secured(seccompProfile={"type": "Unconfined"}), "seccompProfile"),
    "case_09_seccomp_off_in_pod": (_pod(securityContext={"seccompProfile": {"type": "Unconfined"}}), "seccompProfile"),
    "case_09_apparmor_off": (_secured(appArmorProfile={"type": "Unconfined"}), "appArmorProfile"),
    "case_09_windows_host_process": (_secured(windowsOptions={"hostProcess": True}), "windowsOptions.hostProcess"),
    "case_09_host_port": (_worker(ports=[{"containerPort": 1, "hostPort": 80}]), "ports.hostPort"),
    "case_09_foreign_service_account": (
        _pod(serviceAccountName="cluster-admin"),
        "spec.template.spec.serviceAccountName",
    ),
    "case_09_operators_service_account": (_pod(serviceAccountName="everstep"), "spec.template.spec.serviceAccountName"),
    "case_09_service_account_by_its_old_name": (
        _pod(serviceAccount="cluster-admin"),
        "spec.template.spec.serviceAccountName",
    ),
    "restart_policy_always": (_pod(restartPolicy="Always"), "spec.template.spec.restartPolicy"),
    "restart_policy_on_failure": (_pod(restartPolicy="OnFailure"), "spec.template.spec.restartPolicy"),
    "case_11_local_file": (_url("file:///etc"), "spec.checkpoint.url must begin with one of s3://"),
    "case_11_memory": (_url("memory://x"), "spec.checkpoint.url must begin with"),
    "case_11_chained_protocols": (_url("simplecache::s3://bucket/x"), "spec.checkpoint.url"),
    "case_11_http": (_url("http://storage.example.com/x"), "spec.checkpoint.url must begin with"),
    "case_11_metadata_service": (_url("http://169.254.169.254/latest/meta-data"), "spec.checkpoint.url"),
    "case_11_address_as_bucket": (
        _url("s3://169.254.169.254/latest"),
        "spec.checkpoint.url must not name an IP address",
    ),
    "case_11_address_with_port": (_url("s3://10.0.0.1:9000/latest"), "spec.checkpoint.url must not name an IP address"),
    "case_11_ipv6_address": (_url("s3://[fe80::1]/latest"), "spec.checkpoint.url must not name an IP address"),
    "case_11_two_dots_in_a_name": (_url("s3://bucket/a..b"), "spec.checkpoint.url must not contain '..'"),
    "case_11_encoded_dots": (_url("s3://bucket/%2e%2e/other"), "spec.checkpoint.url must not contain"),
    "case_11_backslashes": (_url("s3://bucket\\..\\other"), "spec.checkpoint.url must not contain"),
    "case_11_query": (_url("s3://bucket/a?endpoint_url=http://evil"), "spec.checkpoint.url must not contain"),
    "case_11_fragment": (_url("s3://bucket/a#b"), "spec.checkpoint.url must not contain"),
    "case_11_credentials": (_url("s3://key:secret@bucket/a"), "spec.checkpoint.url must not contain '@'"),
}

APPARMOR = "container.apparmor.security.beta.kubernetes.io/worker"
HOOK = {"httpGet": {"port": 80, "host": "169.254.169.254"}}

# The rows of the standard Pod Security "baseline", in its order; and what a template may only choose from a list.
REFUSED |= {
    "baseline_host_process_of_the_pod": (
        _pod(securityContext={"windowsOptions": {"hostProcess": True}}),
        "windowsOptions.hostProcess",
    ),
    "baseline_host_process_of_an_init_container": (
        _pod(initContainers=[{**SIDE_CAR, "securityContext": {"windowsOptions": {"hostProcess": True}}}]),
        "windowsOptions.hostProcess",
    ),
    "baseline_host_port_of_an_init_container": (
        _pod(initContainers=[{**SIDE_CAR, "ports": [{"containerPort": 1, "hostPort": 80}]}]),
        "ports.hostPort",
    ),
    **{
        f"baseline_host_of_{probe}": (_worker(**{probe: {call: {"port": 80, "host": "10.0.0.1"}}}), "must name no host")
        for probe, call in (("livenessProbe", "httpGet"), ("readinessProbe", "tcpSocket"), ("startupProbe", "httpGet"))
    },
    "baseline_host_of_post_start": (_worker(lifecycle={"postStart": HOOK}), "must name no host"),
    "baseline_host_of_pre_stop": (
        _worker(lifecycle={"preStop": {"tcpSocket": {"port": 80, "host": "10.0.0.1"}}}),
        "must name no host",
    ),
    "baseline_host_of_a_side_cars_probe": (
        _pod(containers=[CONTAINER, {**SIDE_CAR, "livenessProbe": HOOK}]),
        "must name no host",
    ),
    "baseline_apparmor_by_annotation": (
        {"template.metadata": {"annotations": {APPARMOR: "unconfined"}}},
        "container.apparmor.security.beta.kubernetes.io/…",
    ),
    "baseline_apparmor_off_in_pod": (_pod(securityContext={"appArmorProfile": {"type": "Unconfined"}}), "appArmor"),
    "baseline_apparmor_of_another_word": (_secured(appArmorProfile={"type": "unconfined"}), "appArmorProfile.type"),
    "baseline_selinux_type": (_secured(seLinuxOptions={"type": "spc_t"}), "seLinuxOptions"),
    "baseline_selinux_type_of_the_pod": (_pod(securityContext={"seLinuxOptions": {"type": "spc_t"}}), "seLinuxOptions"),
    "baseline_selinux_user": (_secured(seLinuxOptions={"user": "system_u"}), "seLinuxOptions"),
    "baseline_selinux_role": (_secured(seLinuxOptions={"role": "system_r"}), "seLinuxOptions"),
    "baseline_seccomp_of_another_word": (_secured(seccompProfile={"type": "unconfined"}), "seccompProfile.type"),
    "baseline_sysctl": (
        _pod(securityContext={"sysctls": [{"name": "kernel.core_pattern", "value": "|/x"}]}),
        "securityContext.sysctls",
    ),
    "baseline_sysctl_behind_a_good_one": (
        _pod(
            securityContext={
                "sysctls": [
                    {"name": "net.ipv4.tcp_syncookies", "value": "1"}, {"name": "net.core.somaxconn", "value": "9"},
                ]
            }
        ),
        "securityContext.sysctls",
    ),
    "chosen_node_name": (_pod(nodeName="control-plane"), "policy.allowedNodeNames"),
    "chosen_toleration": (
        _pod(tolerations=[{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}]),
        "policy.allowedTolerationKeys",
    ),
    "chosen_toleration_of_everything": (_pod(tolerations=[{"operator": "Exists"}]), "policy.allowedTolerationKeys"),
    "chosen_priority": (_pod(priorityClassName="system-node-critical"), "policy.allowedPriorityClassNames"),
    "chosen_scheduler": (_pod(schedulerName="other"), "policy.allowedSchedulerNames"),
    "chosen_runtime": (_pod(runtimeClassName="kata"), "policy.allowedRuntimeClassNames"),
    "field_of_a_later_version": (_pod(hostEverything=True), "the policy knows no field hostEverything"),
    "security_field_of_a_later_version": (_secured(hostEverything=True), "knows no field of securityContext"),
}  # fmt: skip

ACCEPTED: dict[str, dict[str, Any]] = {
    "all_that_baseline_allows": {
        **_pod(
            securityContext={
                "sysctls": [{"name": "net.ipv4.ip_local_port_range", "value": "1024 65535"}],
                "seLinuxOptions": {"type": "container_t", "level": "s0:c1"},
                "appArmorProfile": {"type": "RuntimeDefault"},
                "fsGroup": 1000,
            },
            containers=[
                {
                    **CONTAINER,
                    "livenessProbe": {"httpGet": {"port": 80, "path": "/"}},
                    "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
                    "securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "a.json"}},
                }
            ],
        ),
        "template.metadata": {"annotations": {APPARMOR: "localhost/worker", "team": "a"}, "labels": {"a": "b"}},
    },
    "accelerators_taint": _pod(
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}], runtimeClassName="nvidia"
    ),
    "plain": GOOD_URL,
    "without_checkpoint": {},
    "google_storage": _url("gs://bucket/digits"),
    "azure": _url("abfs://container/digits"),
    "explicit_defaults": {
        **_pod(
            hostNetwork=False, restartPolicy="Never", serviceAccountName="default", volumes=[], securityContext=None
        ),
        **GOOD_URL,
    },
    "hardened": _secured(
        privileged=False,
        allowPrivilegeEscalation=False,
        runAsNonRoot=True,
        capabilities={"drop": ["ALL"]},
        seccompProfile={"type": "RuntimeDefault"},
    ),
    "volumes_that_belong_to_the_job": _pod(
        volumes=[
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "settings", "configMap": {"name": "settings"}},
        ]
    ),
    "ports_and_side_cars": _pod(
        containers=[{**CONTAINER, "ports": [{"containerPort": 8000}]}, SIDE_CAR],
        initContainers=[{**SIDE_CAR, "name": "i"}],
    ),
}


def _wait_until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, f"not within 30 s: {what}"
        time.sleep(0.2)


def _render(helm: Any, *flags: str) -> str:
    """The policy and its binding as YAML."""
    return str(helm("template", "everstep", "-n", OPERATOR_NAMESPACE, "-s", "templates/policy.yaml", *flags).stdout)


def _refused(jobs: Any, changes: dict[str, Any]) -> bool:
    return bool(jobs.try_create("probe", changes, "--dry-run=server").returncode)


@pytest.fixture(scope="module")
def guarded(jobs: Any, helm: Any) -> Iterator[Any]:
    """Jobs in a cluster whose policy is in force (the API server takes a new one in after a second or so)."""
    plane, manifest = jobs.control_plane, _render(helm)
    plane.kubectl("create", "namespace", OPERATOR_NAMESPACE)
    done = plane.kubectl("apply", "-f", "-", input=manifest)
    assert done.returncode == 0, done.stderr
    _wait_until("the policy is in force", lambda: _refused(jobs, _pod(hostPID=True)))
    yield jobs
    plane.kubectl("delete", "-f", "-", input=manifest)
    # The API server forgets a policy a moment after its deletion: until then it would refuse the next tests' jobs.
    _wait_until("the policy is forgotten", lambda: not _refused(jobs, _pod(hostPID=True)))


@pytest.mark.parametrize(("changes", "field"), REFUSED.values(), ids=REFUSED)
def test_dangerous_spec_is_refused_by_name_of_the_field(guarded: Any, changes: dict[str, Any], field: str) -> None:
    done = guarded.try_create("refused", changes)
    assert done.returncode != 0
    assert field in done.stderr
    assert not guarded.exists("refused")


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_harmless_spec_is_accepted(guarded: Any, changes: dict[str, Any]) -> None:
    done = guarded.try_create("probe", changes, "--dry-run=server")
    assert done.returncode == 0, done.stderr


def test_jobs_of_all_examples_and_their_pods_are_accepted(guarded: Any) -> None:
    """All in one kubectl, which refuses fields that the API server would drop. The pods are those of the templates: the
    schema of a job leaves the inside of containers and volumes open."""
    files = sorted((Path(__file__).parents[2] / "examples").glob("*/*.yaml"))
    found: list[dict[str, Any]] = []
    for i, file in enumerate(files):
        found.append(job := yaml.safe_load(file.read_text()))
        assert job["kind"] == "TrainingJob", file
        pod = {"metadata": {"name": f"{i}-{job['metadata']['name']}"}, "spec": job["spec"]["template"]["spec"]}
        found.append({"apiVersion": "v1", "kind": "Pod", **pod})
    done = guarded.kubectl("create", "--dry-run=server", "-f", "-", input=yaml.safe_dump_all(found))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert len(done.stdout.splitlines()) == len(found) == 2 * len(files) > 60, done.stdout


def test_job_in_the_operators_namespace_is_refused_case_09(guarded: Any) -> None:
    body = guarded.body("refused", {})
    body["metadata"]["namespace"] = OPERATOR_NAMESPACE
    done = guarded.control_plane.kubectl("create", "-f", "-", input=json.dumps(body))
    assert done.returncode != 0
    assert f"operator's own namespace {OPERATOR_NAMESPACE}" in done.stderr
    assert guarded.control_plane.kubectl("get", "tjob", "-n", OPERATOR_NAMESPACE, "-o", "name").stdout == ""


def test_change_of_the_template_is_denied_and_the_job_undisturbed_case_06(guarded: Any) -> None:
    before = guarded.create("steady", {})
    for change in ({"nodeSelector": {"a": "b"}}, {"containers": [{**CONTAINER, "image": "train:2"}]}):
        done = guarded.patch("steady", {"spec": {"template": {"spec": change}}})
        assert done.returncode != 0
        assert "spec.template is immutable" in done.stderr
        assert "set spec.suspend: true in the same update" in " ".join(done.stderr.split())
    assert guarded.get("steady") == before


def test_update_that_suspends_or_resumes_a_job_may_change_its_template_case_06(guarded: Any) -> None:
    """As Kueue does, which puts the template back as it suspends a job, and sets node selectors as it resumes it."""
    guarded.create("queued", {"suspend": True})
    for selector, suspend in (({"pool": "a"}, False), ({"pool": None}, True), ({"pool": "b"}, False)):
        done = guarded.patch("queued", {"spec": {"suspend": suspend, "template": {"spec": {"nodeSelector": selector}}}})
        assert done.returncode == 0, done.stderr
    assert guarded.get("queued")["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "b"}
    done = guarded.patch("queued", {"spec": {"template": {"spec": {"nodeSelector": {"pool": "c"}}}}})
    assert "spec.template is immutable" in done.stderr


def test_job_of_looser_rules_can_be_suspended_and_labelled_and_is_judged_when_it_resumes(
    guarded: Any, helm: Any
) -> None:
    """Rules that were tightened behind it would otherwise keep it running: each update of it was refused."""
    plane, strict = guarded.control_plane, _render(helm)
    loose = _render(helm, "--set", "policy.allowHostNetwork=true,policy.allowedSchedulerNames={mine}")
    spec = _pod(hostNetwork=True, schedulerName="mine")
    try:
        assert plane.kubectl("apply", "-f", "-", input=loose).returncode == 0
        _wait_until("the looser rules are in force", lambda: not _refused(guarded, spec))
        guarded.create("older", spec)
    finally:
        assert plane.kubectl("apply", "-f", "-", input=strict).returncode == 0
        _wait_until("the rules are in force again", lambda: _refused(guarded, spec))
    for change in ({"metadata": {"labels": {"team": "a"}}}, {"spec": {"suspend": True}}):
        done = guarded.patch("older", change)
        assert done.returncode == 0, done.stderr
    for change in ({"suspend": False}, {"replicas": 1}):
        done = guarded.patch("older", {"spec": change})
        assert done.returncode != 0, change
        assert "spec.hostNetwork must not be set" in done.stderr, change
    repaired = {"hostNetwork": None, "schedulerName": None}
    assert guarded.patch("older", {"spec": {"suspend": False, "template": {"spec": repaired}}}).returncode == 0


def test_update_that_runs_a_finished_job_again_may_change_its_template(guarded: Any) -> None:
    guarded.create("again", {})
    over = json.dumps({"status": {"completionTime": "2026-01-01T00:00:00Z"}})
    done = guarded.kubectl("patch", "tjob/again", "--subresource=status", "--type=merge", "-p", over)
    assert done.returncode == 0, done.stderr
    template = {"spec": {"nodeSelector": {"pool": "a"}}}
    done = guarded.patch("again", {"spec": {"template": template}})
    assert "of a finished job raise spec.rerun in the same update" in " ".join(done.stderr.split())
    assert guarded.patch("again", {"spec": {"template": template, "rerun": 1}}).returncode == 0
    done = guarded.patch("again", {"spec": {"template": {"spec": {"hostNetwork": True}}, "rerun": 2}})
    assert "spec.template.spec.hostNetwork" in done.stderr


def test_good_job_cannot_be_changed_into_a_dangerous_one_case_09(guarded: Any) -> None:
    guarded.create("turned", {})
    done = guarded.patch("turned", {"spec": {"template": {"spec": {"hostNetwork": True}}}})
    assert done.returncode != 0
    assert "spec.template.spec.hostNetwork" in done.stderr


def test_other_changes_pass_the_policy(guarded: Any) -> None:
    guarded.create("edited", GOOD_URL)
    done = guarded.patch(
        "edited", {"spec": {"replicas": 3, "checkpoint": {"keep": 5}}, "metadata": {"labels": {"a": "b"}}}
    )
    assert done.returncode == 0, done.stderr
    scaled = guarded.kubectl("scale", "tjob/edited", "--replicas=4")
    assert scaled.returncode == 0, scaled.stderr
    status = guarded.patch("edited", {"status": {"readyReplicas": 1}}, "--subresource=status")
    assert status.returncode == 0, status.stderr


def test_policy_has_no_expression_that_its_type_checker_warns_about(guarded: Any) -> None:
    def read() -> dict[str, Any]:
        done = guarded.kubectl("get", "validatingadmissionpolicy", "everstep-trainingjobs", "-o", "json")
        return dict(json.loads(done.stdout))

    _wait_until("the controller manager has checked the types", lambda: "typeChecking" in read().get("status", {}))
    assert read()["status"]["typeChecking"] == {}


@pytest.mark.long
def test_chart_values_widen_and_narrow_the_policy(guarded: Any, helm: Any) -> None:
    """`{namespace}` keeps tenants out of each other's part of a bucket (failure mode 11)."""
    plane = guarded.control_plane
    plane.kubectl("delete", "-f", "-", input=_render(helm))
    _wait_until("the policy is gone", lambda: not _refused(guarded, _pod(hostPID=True)))
    values = json.dumps(["s3://shared/{namespace}/", "abfs://box@account/"])
    changed = _render(
        helm,
        *("--set-json", f"policy.checkpointUrlPrefixes={values}"),
        *("--set-json", 'policy.allowedCapabilities=["IPC_LOCK"]'),
        *("--set-json", 'policy.allowedServiceAccounts=["trainer"]'),
        *("--set-json", 'policy.allowedNodeNames=["", "n1"]'),
        *("--set-json", 'policy.allowedTolerationKeys=["*"]'),
        *("--set-json", 'policy.allowedPriorityClassNames=["batch"]'),
        *("--set-json", 'policy.allowedSchedulerNames=["", "volcano"]'),
        *("--set-json", 'policy.allowedRuntimeClassNames=["*"]'),
        *("--set", "policy.allowHostNetwork=true"),
        *("--set", "podGroups={Volcano,Kubernetes}"),
    )
    applied = plane.kubectl("apply", "-f", "-", input=changed)
    assert applied.returncode == 0, applied.stderr
    _wait_until("the policy is in force", lambda: _refused(guarded, _pod(hostPID=True)))
    allowed = _pod(serviceAccountName="trainer", priorityClassName="batch")
    everything = [{"operator": "Exists"}]
    chosen = {"nodeName": "n1", "tolerations": everything, "schedulerName": "volcano", "runtimeClassName": "kata"}
    assert not _refused(guarded, {**allowed, **_pod(**chosen)})
    assert not _refused(guarded, {**allowed, **_pod(hostNetwork=True)})
    assert not _refused(guarded, {**allowed, "scheduling": {"podGroup": {"scheduler": "Volcano"}}})
    assert _refused(guarded, {**allowed, "scheduling": {"podGroup": {"scheduler": "Coscheduling"}}})
    assert _refused(guarded, {**allowed, **_pod(nodeName="n2")})
    assert _refused(guarded, {**allowed, **_pod(schedulerName="default-scheduler")})
    assert _refused(guarded, _pod(serviceAccountName="trainer"))  # without the class that all have to have
    own, others = f"s3://shared/{guarded.namespace}/a", "s3://shared/other-tenant/a"
    assert not _refused(guarded, {**allowed, **_url(own), **_secured(capabilities={"add": ["IPC_LOCK"]})})
    assert not _refused(guarded, {**allowed, **_url("abfs://box@account/a")})
    assert _refused(guarded, {**allowed, **_url(others)})
    assert _refused(guarded, {**allowed, **_url("abfs://box@account/user@x")})
    assert _refused(guarded, {**allowed, **_secured(capabilities={"add": ["SYS_ADMIN"]})})
    assert _refused(guarded, _pod(serviceAccountName="default"))
    assert not _refused(guarded, _pod(serviceAccount="trainer", priorityClassName="batch"))
