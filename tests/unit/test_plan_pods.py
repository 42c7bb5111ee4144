"""The worker pod: whose settings win, what reaches which container, and that torchrun reads what is injected."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from everstep.agent.arguments import read
from everstep.membership.backends.configuration import read_operator
from everstep_local.kubelet import environment as kubelet
from everstep_operator import object_names
from everstep_operator.api.base import SpecError
from everstep_operator.api.parse import parse_spec
from everstep_operator.api.status import Status
from everstep_operator.api.types import GangScheduler
from everstep_operator.plan.actions import CreateNetworkPolicy, CreatePodGroup
from everstep_operator.plan.planner import plan
from everstep_operator.plan.render import pods
from everstep_operator.plan.snapshot import JobView, Settings, Snapshot
from everstep_operator.plan.state import pod_hash

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = Settings(report_url="http://everstep.everstep-system:8080/")
TEMPLATE: dict[str, Any] = {
    "metadata": {
        "labels": {"team": "vision", "app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"note": "kept"},
    },
    "spec": {
        "volumes": [{"name": "data", "emptyDir": {}}],
        "setHostnameAsFQDN": False,
        "nodeSelector": {"zone": "a"},
        "initContainers": [{"name": "fetch", "image": "fetch:1", "env": [{"name": "A", "value": "b"}]}],
        "containers": [
            {"name": "sidecar", "image": "side:1"},
            {
                "name": "worker",
                "image": "train:1",
                "command": ["torchrun", "train.py", "--name", "$(rm -rf /); `id`\n$(EVERSTEP_JOB_UID)"],
                "env": [
                    {"name": "EPOCHS", "value": "3"},
                    {"name": "PET_RDZV_ENDPOINT", "value": "elsewhere:1"},
                    {"name": "EVERSTEP_ROUND", "value": "99"},
                    {"name": "EVERSTEP_POD_NAME", "value": "impostor"},
                    {"name": "PET_MAX_RESTARTS", "value": "5"},
                ],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            },
        ],
    },
}


def job(template: dict[str, Any] | None = None, name: str = "digits", **spec: Any) -> JobView:
    raw = {
        "replicas": 2,
        "rendezvous": {"backend": "c10d"},
        "template": copy.deepcopy(TEMPLATE if template is None else template),
        **spec,
    }
    return JobView("team-a", name, "uid-1", 1, "1", parse_spec(raw), Status(), NOW)


def container(body: dict[str, Any], name: str = "worker") -> dict[str, Any]:
    spec = body["spec"]
    return next(c for c in [*spec["containers"], *spec.get("initContainers", ())] if c["name"] == name)


def values(body: dict[str, Any]) -> dict[str, str]:
    listed = container(body)["env"]
    assert len({e["name"] for e in listed}) == len(listed), "a variable is given twice"
    return {e["name"]: e["value"] for e in listed if "value" in e}


def expand(value: str) -> str:
    """What the kubelet makes of a value that mentions no defined variable (third_party/forked/golang/expansion)."""
    return value.replace("$$", "$")


def test_identity_that_the_user_sets_is_replaced_and_tuning_is_kept() -> None:
    body = pods.worker_pod(job(), 1, 7, 2, SETTINGS)
    env = values(body)
    assert env["EVERSTEP_ROUND"] == "7"
    assert env["EVERSTEP_WORKER_INDEX"] == "1"
    assert env["EVERSTEP_INCARNATION"] == "6"
    assert env["PET_RDZV_ENDPOINT"] == "digits-w0-6.digits-workers.team-a.svc:29400"
    assert env["PET_RDZV_ID"] == "uid-1-7"
    assert "EVERSTEP_POD_NAME" not in env  # from the pod itself
    assert env["EVERSTEP_GRACE_SECONDS"] == env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "30"
    assert env["PET_MAX_RESTARTS"] == "5"
    assert env["EPOCHS"] == "3"
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container(body)["env"] if "valueFrom" in e}
    assert fields == {
        "EVERSTEP_POD_NAME": "metadata.name",
        "EVERSTEP_NODE_NAME": "spec.nodeName",
        "PET_LOCAL_ADDR": "status.podIP",
    }


async def test_variable_of_the_template_may_refer_to_ours_and_to_its_own() -> None:
    template = copy.deepcopy(TEMPLATE)
    listed = template["spec"]["containers"][1]["env"]
    listed += [
        {"name": "RUN", "value": "$(EPOCHS)-$(EVERSTEP_WORKER_INDEX)-$(EVERSTEP_ROUND)"},
        {"name": "WHERE", "value": "$(EVERSTEP_POD_NAME)@$(EVERSTEP_CHECKPOINT_URL)"},
    ]
    body = pods.worker_pod(job(template, checkpoint={"url": "s3://b/$(EPOCHS)"}), 1, 7, 2, SETTINGS)
    read: dict[str, str] = {}
    for entry in container(body)["env"]:  # as the kubelet does: in order, from those that came before
        given = entry.get("value")
        read[entry["name"]] = body["metadata"]["name"] if given is None else kubelet.expand(given, read)
    assert read["RUN"] == "3-1-7"
    assert read["WHERE"] == "digits-w1-6@s3://b/$(EPOCHS)"


def test_labels_of_identity_are_ours_and_the_rest_of_the_template_is_kept() -> None:
    body = pods.worker_pod(job(), 1, 7, 2, SETTINGS)
    assert body["metadata"]["labels"] == {
        "team": "vision",
        "everstep.dev/job": "digits",
        "everstep.dev/job-uid": "uid-1",
        "everstep.dev/worker-index": "1",
        "everstep.dev/incarnation": "6",
        "everstep.dev/round": "7",
        "everstep.dev/spec-hash": pod_hash.of_spec(job().spec),
        "app.kubernetes.io/managed-by": "Helm",
    }
    assert body["metadata"]["annotations"]["note"] == "kept"
    [owner] = body["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["kind"], owner["controller"]) == ("uid-1", "TrainingJob", True)
    assert body["spec"]["restartPolicy"] == "Never"
    assert body["spec"]["setHostnameAsFQDN"] is False
    assert body["spec"]["nodeSelector"] == {"zone": "a"}
    assert (body["spec"]["hostname"], body["spec"]["subdomain"]) == ("digits-w1-6", "digits-workers")
    assert container(body, "sidecar") == {"name": "sidecar", "image": "side:1"}
    # Without this its last words would be lost.
    policy = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    assert container(body, "fetch") == {**TEMPLATE["spec"]["initContainers"][0], **policy}


def test_command_with_shell_characters_stays_the_same_argv() -> None:
    """Case 10: nothing is joined, quoted or given to a shell."""
    assert (
        container(pods.worker_pod(job(), 0, 1, 2, SETTINGS))["command"] == TEMPLATE["spec"]["containers"][1]["command"]
    )


@pytest.mark.parametrize("path", ["$(HOME)", "$$", "$(EVERSTEP_JOB_UID)$$(X)", "a$b", "`id`;'\""])
def test_checkpoint_url_with_references_reaches_the_process_unexpanded(path: str) -> None:
    url = f"s3://bucket/{path}"
    env = values(pods.worker_pod(job(checkpoint={"url": url}), 0, 1, 2, SETTINGS))
    written = env["EVERSTEP_CHECKPOINT_URL"]
    assert expand(written) == url
    assert "$(" not in written.replace("$$", ""), "the kubelet would put a variable's value here"


def test_token_volume_is_bound_to_our_audience_and_mounted_into_the_worker_only() -> None:
    body = pods.worker_pod(job(), 0, 1, 2, SETTINGS)
    volumes = {v["name"]: v for v in body["spec"]["volumes"]}
    assert volumes["data"] == {"name": "data", "emptyDir": {}}
    [source] = volumes["everstep-token"]["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "everstep.dev/operator"
    assert len(body["spec"]["volumes"]) == 3
    mounts = {m["name"]: m for m in container(body)["volumeMounts"]}
    assert set(mounts) == {"data", "everstep-token", "everstep-shm"}
    assert mounts["everstep-token"]["readOnly"]
    assert values(body)["EVERSTEP_TOKEN_FILE"].startswith(mounts["everstep-token"]["mountPath"] + "/")
    assert not container(body, "sidecar").get("volumeMounts")
    assert not container(body, "fetch").get("volumeMounts")


@pytest.mark.parametrize(
    ("asked", "mounted"),
    [({}, False), ({"automountServiceAccountToken": True}, True), ({"serviceAccountName": "trainer"}, None)],
)
def test_worker_has_a_token_of_the_api_server_only_if_its_template_asks(
    asked: dict[str, Any], mounted: bool | None
) -> None:
    template = copy.deepcopy(TEMPLATE)
    template["spec"].update(asked)
    assert pods.worker_pod(job(template), 0, 1, 2, SETTINGS)["spec"].get("automountServiceAccountToken") is mounted


def test_shared_memory_of_a_worker_is_as_large_as_its_memory() -> None:
    body = pods.worker_pod(job(), 0, 1, 2, SETTINGS)
    volumes = {v["name"]: v for v in body["spec"]["volumes"]}
    assert volumes["everstep-shm"] == {"name": "everstep-shm", "emptyDir": {"medium": "Memory"}}
    assert {"name": "everstep-shm", "mountPath": "/dev/shm"} in container(body)["volumeMounts"]
    may_be_lost = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    assert body["metadata"]["annotations"][may_be_lost] == "everstep-shm"


@pytest.mark.parametrize("own", ["a volume", "the node's"])
def test_shared_memory_of_the_template_is_kept(own: str) -> None:
    template = copy.deepcopy(TEMPLATE)
    if own == "the node's":
        template["spec"]["hostIPC"] = True
    else:
        template["spec"]["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}})
        template["spec"]["containers"][1]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm/"})
    body = pods.worker_pod(job(template), 0, 1, 2, SETTINGS)
    assert "everstep-shm" not in json.dumps(body)


def test_workers_are_spread_over_nodes_by_a_rule_that_keeps_none_of_them_waiting() -> None:
    body = pods.worker_pod(job(), 0, 1, 2, SETTINGS)
    (constraint,) = body["spec"]["topologySpreadConstraints"]
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    assert constraint["topologyKey"] == "kubernetes.io/hostname"
    selected = constraint["labelSelector"]["matchLabels"]
    assert selected.items() <= body["metadata"]["labels"].items()
    assert selected.items() <= pods.worker_pod(job(), 1, 7, 2, SETTINGS)["metadata"]["labels"].items()


RACK = {"topologyKey": "rack", "labelSelector": {"matchLabels": {"everstep.dev/job": "digits"}}}


@pytest.mark.parametrize(
    "own",
    [
        {"topologySpreadConstraints": []},
        {"topologySpreadConstraints": [{**RACK, "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}]},
        {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [RACK]}}},
        {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [RACK]}}},
        {"nodeName": "n1"},
    ],
    ids=lambda own: f"{next(iter(own))}-{len(str(own))}",
)
def test_template_that_says_how_its_workers_lie_to_each_other_is_kept(own: dict[str, Any]) -> None:
    template = copy.deepcopy(TEMPLATE)
    template["spec"] |= own
    body = pods.worker_pod(job(template), 0, 1, 2, SETTINGS)["spec"]
    assert body.get("topologySpreadConstraints") == own.get("topologySpreadConstraints")
    assert body.get("affinity") == own.get("affinity")


def test_secret_of_the_store_is_given_to_the_worker_container_only() -> None:
    """Case 12: neither side-cars nor init containers hold the store's credentials."""
    wanted = {"url": "s3://b/p", "secretRef": {"name": "s3-credentials"}}
    body = pods.worker_pod(job(checkpoint=wanted), 0, 1, 2, SETTINGS)
    assert container(body)["envFrom"] == [{"secretRef": {"name": "s3-credentials"}}]
    assert "s3-credentials" not in str(container(body, "sidecar")) + str(container(body, "fetch"))


def test_checkpoint_settings_in_steps_are_given_instead_of_seconds() -> None:
    env = values(pods.worker_pod(job(checkpoint={"url": "s3://b/p", "everySteps": 50, "keep": 2}), 0, 1, 2, SETTINGS))
    assert env["EVERSTEP_CHECKPOINT_EVERY_STEPS"] == "50"
    assert env["EVERSTEP_CHECKPOINT_KEEP"] == "2"
    assert "EVERSTEP_CHECKPOINT_EVERY_SECONDS" not in env
    assert not [name for name in env if name.startswith("EVERSTEP_CHECKPOINT_KEEP_EVERY")]


@pytest.mark.parametrize("wanted", [False, True])
def test_save_at_the_end_of_a_pod_is_given_to_the_worker_if_it_is_wanted(wanted: bool) -> None:
    body = pods.worker_pod(job(checkpoint={"url": "s3://b/p", "onPreemption": wanted}), 0, 1, 2, SETTINGS)
    assert values(body).get("EVERSTEP_CHECKPOINT_ON_PREEMPTION") == ("1" if wanted else None)
    without = job(checkpoint={"url": "s3://b/p"}).spec
    changes = body["metadata"]["labels"]["everstep.dev/spec-hash"] != pod_hash.of_spec(without)
    assert changes == wanted, "all ranks of a world have to agree on it"


def test_what_is_kept_for_good_is_given_to_the_worker() -> None:
    wanted = {"url": "s3://b/p", "keepEverySteps": 1000, "keepEveryHours": 6}
    env = values(pods.worker_pod(job(checkpoint=wanted), 0, 1, 2, SETTINGS))
    assert env["EVERSTEP_CHECKPOINT_KEEP_EVERY_STEPS"] == "1000"
    assert env["EVERSTEP_CHECKPOINT_KEEP_EVERY_HOURS"] == "6"


def test_template_with_nulls_makes_the_pod_that_absent_fields_make() -> None:
    bare = {"spec": {"containers": [{"name": "worker", "image": "train:1"}]}}
    nulls = {
        "metadata": {"labels": None, "annotations": None},
        "spec": {
            "volumes": None,
            "initContainers": None,
            "containers": [
                {"name": "worker", "image": "train:1", "env": None, "envFrom": None, "volumeMounts": None}
            ],
        },
    }  # fmt: skip
    wanted = {"url": "s3://b/p", "secretRef": {"name": "s"}}
    made, expected = (pods.worker_pod(job(t, checkpoint=wanted), 0, 1, 2, SETTINGS) for t in (nulls, bare))
    del made["spec"]["initContainers"]
    assert made == expected


def test_template_is_not_changed_by_making_a_pod() -> None:
    view = job()
    before = copy.deepcopy(view.spec.template)
    first = pods.worker_pod(view, 0, 1, 2, SETTINGS)
    first["spec"]["containers"].clear()
    assert view.spec.template == before
    assert pods.worker_pod(view, 0, 1, 2, SETTINGS)["spec"]["containers"]


def test_longest_names_fit_a_host_name() -> None:
    longest = "a" * 48
    assert len(object_names.pod_name(longest, 4095, 99_999_999)) == 63
    assert len(object_names.service_name(longest)) <= 63
    body = pods.worker_pod(job(name=longest), 4095, 100_000_000, 4096, SETTINGS)
    assert len(body["spec"]["hostname"]) == 63
    assert all(len(value) <= 63 for value in body["metadata"]["labels"].values())


def test_service_selects_by_uid_and_answers_before_pods_are_ready() -> None:
    """Two jobs of one name, one after the other or in two namespaces, must not meet."""
    body = pods.service(job())
    assert body["spec"]["selector"] == {"everstep.dev/job-uid": "uid-1"}
    assert body["spec"]["publishNotReadyAddresses"]
    assert body["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize(
    ("hang", "told"),
    [
        ({}, {"EVERSTEP_HANG_SECONDS": "60"}),
        ({"mode": "Auto", "floorSeconds": 5}, {"EVERSTEP_HANG_SECONDS": "5"}),
        ({"mode": "Fixed", "timeoutSeconds": 9}, {"EVERSTEP_HANG_SECONDS": "9", "EVERSTEP_HANG_FACTOR": "0"}),
        ({"mode": "Off"}, {"EVERSTEP_HANG_SECONDS": "0"}),
    ],
)
def test_agents_are_told_how_long_a_step_and_a_recovery_may_take(hang: dict[str, Any], told: dict[str, str]) -> None:
    view = job(recovery={"hang": hang}, rendezvous={"backend": "everstep", "joinTimeoutSeconds": 90})
    env = values(pods.agent_pod(view, 0, 0, SETTINGS))
    assert {k: v for k, v in env.items() if "_HANG_" in k} == told
    assert env["EVERSTEP_RECOVERY_SECONDS"] == "90"
    arguments = read(["train.py"], env)
    assert arguments.hang_seconds == float(told["EVERSTEP_HANG_SECONDS"])
    assert arguments.hang_factor == float(told.get("EVERSTEP_HANG_FACTOR", "10"))
    assert arguments.recovery_seconds == 90


def test_failures_of_the_program_are_the_operators_unless_the_template_says_otherwise() -> None:
    spec: dict[str, Any] = {"rendezvous": {"backend": "everstep"}, "recovery": {"maxRestarts": 4}}
    bare = {"spec": {"containers": [{"name": "worker", "image": "train:1"}]}}
    env = values(pods.agent_pod(job(bare, **spec), 0, 0, SETTINGS))
    assert env["PET_MAX_RESTARTS"] == "3", "torchrun counts the loss of a peer too"
    assert read(["train.py"], env).max_restarts == 0
    env = values(pods.agent_pod(job(**spec), 0, 0, SETTINGS))
    assert read(["train.py"], env).max_restarts == 5, "the template's own"


def test_hang_settings_of_the_template_win_and_the_rendezvous_settings_do_not() -> None:
    template = copy.deepcopy(TEMPLATE)
    template["spec"]["containers"][1]["env"] = [
        {"name": "EVERSTEP_HANG_SECONDS", "value": "7"},
        {"name": "PET_RDZV_BACKEND", "value": "etcd"},
    ]
    env = values(pods.agent_pod(job(template, rendezvous={"backend": "everstep"}), 0, 0, SETTINGS))
    assert env["EVERSTEP_HANG_SECONDS"] == "7"
    assert env["PET_RDZV_BACKEND"] == "everstep"


def test_secret_of_etcd_is_mounted_into_the_worker_container_only() -> None:
    """Case 12, and the settings are such as the agent reads."""
    etcd = {"endpoints": ["https://etcd-0:2379"], "secretRef": {"name": "etcd-credentials"}}
    body = pods.agent_pod(job(rendezvous={"backend": "etcd", "etcd": etcd}), 0, 0, SETTINGS)
    volumes = [v for v in body["spec"]["volumes"] if v["name"] == "everstep-etcd"]
    assert volumes == [{"name": "everstep-etcd", "secret": {"secretName": "etcd-credentials"}}]
    [mount] = [m for m in container(body)["volumeMounts"] if m["name"] == "everstep-etcd"]
    assert mount["readOnly"]
    assert read(["train.py"], values(body)).rendezvous["secret_dir"] == mount["mountPath"]
    assert not container(body, "sidecar").get("volumeMounts")
    plain = pods.agent_pod(job(rendezvous={"backend": "etcd", "etcd": {**etcd, "secretRef": None}}), 0, 0, SETTINGS)
    assert "everstep-etcd" not in str(plain)


def test_agents_that_wait_for_replacements_are_given_the_time_for_it() -> None:
    sizes = {"minReplicas": 1, "maxReplicas": 4, "shrinkAfterSeconds": 30}
    spec: dict[str, Any] = {"elastic": sizes, "rendezvous": {"backend": "everstep", "joinTimeoutSeconds": 90}}
    arguments = read(["train.py"], values(pods.agent_pod(job(**spec), 0, 0, SETTINGS)))
    settings = read_operator(arguments.rendezvous, arguments.endpoint, {"EVERSTEP_TOKEN_FILE": "token"})
    assert (settings.settings.patience.shrink_after, settings.timeout) == (30, 120)


_PARSE = """
import json, sys
from torch.distributed.run import config_from_args, parse_args
config, _, _ = config_from_args(parse_args(["train.py"]))
print(json.dumps([config.min_nodes, config.max_nodes, config.nproc_per_node, config.run_id, config.rdzv_backend,
                  config.rdzv_endpoint, config.rdzv_configs, config.max_restarts, config.monitor_interval,
                  config.local_addr]))
"""


def test_injected_settings_are_what_torchrun_itself_reads() -> None:
    body = pods.worker_pod(
        job({"spec": {"containers": [{"name": "worker"}]}}, processesPerReplica=2), 1, 3, 4, SETTINGS
    )
    env = {**{k: expand(v) for k, v in values(body).items()}, "PET_LOCAL_ADDR": "10.0.0.7", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", _PARSE], env=env, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    low, high, processes, run_id, backend, endpoint, conf, restarts, interval, address = json.loads(done.stdout)
    assert (low, high, processes, run_id) == (4, 4, 2, "uid-1-3")
    assert (backend, endpoint) == ("c10d", "digits-w0-2.digits-workers.team-a.svc:29400")
    assert (restarts, interval, address) == (0, 0.1, "10.0.0.7")
    assert conf["is_host"] in ("0", 0, False)
    # Case 66: with torchrun's store shared, keys of an earlier attempt meet the next one.
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert {
        k: int(v) for k, v in conf.items() if k in ("join_timeout", "last_call_timeout", "keep_alive_interval")
    } == {
        "join_timeout": 600,
        "last_call_timeout": 1,
        "keep_alive_interval": 1,
    }


OURS: dict[str, tuple[dict[str, Any], str]] = {
    "hostname": ({"spec": {"hostname": "trainer"}}, "spec.template.spec.hostname"),
    "subdomain": ({"spec": {"subdomain": "trainers"}}, "spec.template.spec.subdomain"),
    "fqdn": ({"spec": {"setHostnameAsFQDN": True}}, "spec.template.spec.setHostnameAsFQDN"),
    "restart_policy": ({"spec": {"restartPolicy": "OnFailure"}}, "spec.template.spec.restartPolicy"),
    "restarts_itself": (
        {"spec": {"containers": [{"name": "worker", "restartPolicy": "OnFailure"}]}},
        "spec.template.spec.containers",
    ),
    "restarts_by_rules": (
        {"spec": {"containers": [{"name": "worker", "restartPolicy": "Never", "restartPolicyRules": [{}]}]}},
        "spec.template.spec.containers",
    ),
    "name": ({"metadata": {"name": "trainer"}}, "spec.template.metadata.name"),
    "generated_name": ({"metadata": {"generateName": "trainer-"}}, "spec.template.metadata.generateName"),
    "namespace": ({"metadata": {"namespace": "team-b"}}, "spec.template.metadata.namespace"),
    "owner": ({"metadata": {"ownerReferences": [{"name": "a"}]}}, "spec.template.metadata.ownerReferences"),
    "label": ({"metadata": {"labels": {"everstep.dev/round": "99"}}}, "spec.template.metadata.labels"),
    "volume": ({"spec": {"volumes": [{"name": "everstep-token"}]}}, "spec.template.spec.volumes"),
    "volume_of_etcd": (
        {"spec": {"volumes": [{"name": "a"}, {"name": "everstep-etcd", "hostPath": {"path": "/"}}]}},
        "spec.template.spec.volumes",
    ),
}


@pytest.mark.parametrize("case", OURS)
def test_field_of_the_template_that_could_not_be_kept_is_refused_by_its_name(case: str) -> None:
    change, field = OURS[case]
    template = copy.deepcopy(TEMPLATE)
    for part, fields in change.items():
        template[part].update(fields)
    with pytest.raises(SpecError) as refused:
        job(template)
    assert refused.value.path == field
    assert "operator" in refused.value.problem or "worker" in refused.value.problem


def test_finalizers_of_the_template_are_kept_as_by_other_controllers() -> None:
    template = copy.deepcopy(TEMPLATE)
    template["metadata"].update(finalizers=["example.com/accounting"], name="", ownerReferences=[])
    body = pods.worker_pod(job(template), 1, 7, 2, SETTINGS)
    assert body["metadata"]["finalizers"] == ["example.com/accounting"]
    assert "finalizers" not in pods.worker_pod(job(TEMPLATE), 1, 7, 2, SETTINGS)["metadata"]


def test_fields_of_the_template_that_say_what_we_do_anyway_are_accepted() -> None:
    template = copy.deepcopy(TEMPLATE)
    template["spec"].update(hostname="", subdomain=None, restartPolicy="Never")
    spec = pods.worker_pod(job(template), 1, 7, 2, SETTINGS)["spec"]
    assert (spec["hostname"], spec["subdomain"], spec["restartPolicy"]) == ("digits-w1-6", "digits-workers", "Never")


def probed(backend: str, **container: Any) -> dict[str, Any]:
    """The worker's container as it is made from a template whose worker has these fields."""
    template = copy.deepcopy(TEMPLATE)
    next(c for c in template["spec"]["containers"] if c["name"] == "worker").update(container)
    rendezvous = {"backend": backend, **({"etcd": {"endpoints": ["http://e:2379"]}} if backend == "etcd" else {})}
    view = job(template, rendezvous=rendezvous)
    body = pods.worker_pod(view, 1, 7, 2, SETTINGS) if backend == "c10d" else pods.agent_pod(view, 1, 6, SETTINGS)
    made: dict[str, Any] = next(c for c in body["spec"]["containers"] if c["name"] == "worker")
    return made


@pytest.mark.parametrize(("backend", "needed"), [("c10d", True), ("etcd", True), ("everstep", False)])
def test_pod_whose_round_the_operator_does_not_see_is_ready_when_its_worker_has_joined(
    backend: str, needed: bool
) -> None:
    made = probed(backend)
    assert ("startupProbe" in made) is needed
    files = [e["value"] for e in made["env"] if e["name"] == "EVERSTEP_JOINED_FILE"]
    assert files == (["/dev/shm/everstep-joined-digits-w1-6"] if needed else [])


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe"])
def test_probe_of_the_template_says_itself_when_its_worker_is_ready(probe: str) -> None:
    theirs = {"exec": {"command": ["true"]}}
    made = probed("c10d", **{probe: theirs})
    assert [made.get(name) for name in ("startupProbe", "readinessProbe") if name in made] == [theirs]


def test_probe_is_ended_by_its_own_time_before_the_kubelet_counts_a_failure() -> None:
    probe = probed("c10d")["startupProbe"]
    assert probe["timeoutSeconds"] > 2 * 600  # of joinTimeoutSeconds, counted by whole seconds of `sleep`
    assert probe["failureThreshold"] == 2**31 - 1


def policy_of(template: dict[str, Any], *, wanted: bool = True) -> dict[str, Any] | None:
    """The NetworkPolicy that a job with this template gets."""
    snapshot = Snapshot(NOW, job(template), settings=Settings(network_policies=wanted))
    made = [a.body for a in plan(snapshot).actions if isinstance(a, CreateNetworkPolicy)]
    return made[0] if made else None


def test_network_policy_lets_a_jobs_own_pods_reach_all_ports_and_others_the_declared_ones() -> None:
    template = copy.deepcopy(TEMPLATE)
    declared = [{"containerPort": 6006}, {"containerPort": 53, "protocol": "UDP"}, {"containerPort": 29400}]
    template["spec"]["containers"][0]["ports"] = declared
    body = policy_of(template)
    assert body is not None
    own = {"matchLabels": {"everstep.dev/job-uid": "uid-1"}}
    assert body["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": own}]},
            {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 6006, "protocol": "TCP"}]},
        ],
    }
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("uid-1", True)


def test_network_policy_without_declared_ports_has_no_rule_for_everybody() -> None:
    """A rule without `from` and `ports` would let everybody in."""
    template = copy.deepcopy(TEMPLATE)
    for one in template["spec"]["containers"]:
        one.pop("ports", None)
    body = policy_of(template)
    assert body is not None
    assert len(body["spec"]["ingress"]) == 1


def test_no_network_policy_for_pods_with_their_nodes_network_or_where_none_is_wanted() -> None:
    template = copy.deepcopy(TEMPLATE)
    assert policy_of(template, wanted=False) is None
    template["spec"]["hostNetwork"] = True
    assert policy_of(template) is None


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        ({}, None),
        ({"hostNetwork": False}, None),
        ({"hostNetwork": True}, "ClusterFirstWithHostNet"),
        ({"hostNetwork": True, "dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.1"]}}, "None"),
    ],
)
def test_worker_with_its_nodes_network_finds_the_clusters_services(fields: dict[str, Any], policy: str | None) -> None:
    template = copy.deepcopy(TEMPLATE)
    template["spec"] |= fields
    body = pods.agent_pod(job(template, rendezvous={"backend": "everstep"}), 0, 0, SETTINGS)
    assert body["spec"].get("dnsPolicy") == policy


@pytest.mark.parametrize(
    ("named", "scheduler"), [(None, "volcano"), ("volcano-of-the-night", "volcano-of-the-night"), ("", "volcano")]
)
def test_worker_in_a_group_of_volcano_is_placed_by_it_unless_the_template_names_another_scheduler(
    named: str | None, scheduler: str
) -> None:
    template = copy.deepcopy(TEMPLATE)
    template["spec"] |= {} if named is None else {"schedulerName": named}
    asked = {"podGroup": {"scheduler": "Volcano"}}
    body = pods.agent_pod(job(template, rendezvous={"backend": "everstep"}, scheduling=asked), 0, 0, SETTINGS)
    assert body["spec"]["schedulerName"] == scheduler


def test_group_of_a_job_has_the_priority_of_its_pods_where_the_scheduler_compares_groups() -> None:
    template = copy.deepcopy(TEMPLATE)
    template["spec"]["priorityClassName"] = "urgent"

    def spec(scheduler: GangScheduler) -> dict[str, Any]:
        asked = job(template, scheduling={"podGroup": {"scheduler": scheduler}})
        (made,) = (
            action.body
            for action in plan(Snapshot(NOW, asked, settings=Settings(pod_groups=frozenset(GangScheduler)))).actions
            if isinstance(action, CreatePodGroup)
        )
        return dict(made["spec"])

    assert spec(GangScheduler.VOLCANO) == {"minMember": 2, "priorityClassName": "urgent"}
    assert spec(GangScheduler.COSCHEDULING) == {"minMember": 2}
    assert spec(GangScheduler.KUBERNETES) == {
        "schedulingPolicy": {"gang": {"minCount": 2}},
        "priorityClassName": "urgent",
    }


@pytest.mark.parametrize("backend", ["everstep", "c10d"])
@pytest.mark.parametrize(
    ("network", "variables"),
    [
        ({"fabric": "Ethernet", "interface": "eth0"}, {
            "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0",
        }),
        ({"fabric": "InfiniBand", "adapters": ["mlx5_0", "mlx5_1:1"]}, {
            "NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "=mlx5_0,mlx5_1:1",
        }),
        ({"fabric": "RoCE", "gidIndex": 3}, {"NCCL_IB_DISABLE": "0", "NCCL_IB_GID_INDEX": "3"}),
        ({}, {}),
    ],
)  # fmt: skip
def test_network_gives_all_workers_the_same_variables_which_the_template_overrides(
    network: dict[str, Any], variables: dict[str, str], backend: str
) -> None:
    def of(template: dict[str, Any]) -> dict[str, str]:
        asked = job(template, rendezvous={"backend": backend}, network=network)
        made = pods.worker_pod(asked, 0, 1, 2, SETTINGS) if backend == "c10d" else pods.agent_pod(asked, 0, 0, SETTINGS)
        (worker,) = (c for c in made["spec"]["containers"] if c["name"] == "worker")
        return {v["name"]: v["value"] for v in worker["env"] if v["name"].startswith(("NCCL", "GLOO"))}

    template = copy.deepcopy(TEMPLATE)
    assert of(template) == variables
    own = dict.fromkeys(variables, "mine")
    (worker,) = (c for c in template["spec"]["containers"] if c["name"] == "worker")
    worker["env"] = [{"name": name, "value": value} for name, value in own.items()]
    assert of(template) == own
