"""What a container finds: its environment, its volumes, its peers' addresses. Seen from inside real processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep_local.apiserver.cluster import MemoryCluster
from everstep_local.kubelet.addresses import Addresses
from everstep_local.kubelet.starter import Host, Starter
from everstep_operator.kube.client import TokenIdentity
from everstep_operator.kube.errors import ServerError
from everstep_operator.kube.wire import ObjectMeta, Unstructured
from support.clocks.manual import ManualClock

Start = Callable[..., Any]
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


async def environment(m: Any, name: str, spec: dict[str, Any] | None = None, **container: Any) -> dict[str, str]:
    """What a pod with these fields has in its environment."""
    await m.create(name, "python", "-c", SHOW, spec=spec, **container)
    await m.until_phase(name, "Succeeded")
    found: dict[str, str] = json.loads((await m.log(name))[0])
    return found


def value(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "value": text}


def field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


async def test_fields_of_the_pod_are_there(machine: Start) -> None:
    m = await machine()
    paths = {
        "NAME": "metadata.name",
        "NAMESPACE": "metadata.namespace",
        "UID_": "metadata.uid",
        "LABEL": "metadata.labels['app']",
        "NOTE": "metadata.annotations['note']",
        "NODE": "spec.nodeName",
        "IP": "status.podIP",
    }
    found = await environment(m, "fields", env=[field(k, v) for k, v in paths.items()])
    pod = await m.pod("fields")
    assert {k: found[k] for k in paths} == {
        "NAME": "fields",
        "NAMESPACE": "default",
        "UID_": pod.metadata.uid,
        "LABEL": "test",
        "NOTE": "said",
        "NODE": pod.spec["nodeName"],
        "IP": pod.status["podIP"],
    }


async def test_references_are_expanded_in_order_and_dollars_can_be_had(machine: Start) -> None:
    m = await machine()
    env = [value("A", "$(B)"), value("B", "b"), value("C", "$(B)-$(NONE)"), value("D", "$$(B) $$ $x")]
    found = await environment(m, "expands", env=env)
    assert [found[k] for k in "ABCD"] == ["$(B)", "b", "b-$(NONE)", "$(B) $ $x"]
    await m.create("args", "echo", "$(B)", args=["$$(B)", "$(NONE)"], env=env)
    await m.until_phase("args", "Succeeded")
    assert await m.log("args") == ["b $(B) $(NONE)"]


async def test_file_for_a_probe_is_not_asked_for_where_no_probe_looks(machine: Start) -> None:
    """It would be left in /dev/shm of this machine."""
    m = await machine()
    env = [value("EVERSTEP_JOINED_FILE", "/dev/shm/everstep-joined-x"), value("A", "a")]
    found = await environment(m, "unprobed", env=env)
    assert ("EVERSTEP_JOINED_FILE" in found, found["A"]) == (False, "a")


async def test_secrets_and_config_maps_come_from_the_cluster(machine: Start) -> None:
    m = await machine()
    await m.secret("s", user="ann", word="pass")
    await m.config_map("c", level="3", word="plain")
    env = [
        {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "word"}}},
        {"name": "LEVEL", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "level"}}},
        {"name": "GONE", "valueFrom": {"secretKeyRef": {"name": "none", "key": "x", "optional": True}}},
        value("user", "bob"),
    ]
    sources = [{"secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}, "prefix": "C_"}]
    found = await environment(m, "keys", env=env, envFrom=[*sources, {"secretRef": {"name": "no", "optional": True}}])
    wanted = {"WORD": "pass", "LEVEL": "3", "user": "bob", "word": "pass", "C_word": "plain", "C_level": "3"}
    assert {k: v for k, v in found.items() if k in wanted} == wanted
    assert "GONE" not in found


async def test_nothing_of_the_callers_settings_gets_in(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PET_NNODES", "RANK", "WORLD_SIZE", "MASTER_ADDR", "EVERSTEP_ROUND", "AWS_SECRET_ACCESS_KEY", "MINE"):
        monkeypatch.setenv(name, "from the caller")
    m = await machine(pass_env=frozenset({"MINE"}))
    found = await environment(m, "clean")
    assert [k for k, v in found.items() if v == "from the caller"] == ["MINE"]
    assert found["HOSTNAME"] == "clean"
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    assert found["TMPDIR"].startswith(str(m.nodes.folder))
    assert found["PATH"].startswith(str(Path(sys.executable).parent))


async def test_pod_waits_for_a_missing_secret_and_starts_when_it_comes(machine: Start) -> None:
    m = await machine()
    await m.create("waits", "sh", "-c", "echo $WORD", envFrom=[{"secretRef": {"name": "later"}}])
    waiting = await m.until_waiting("waits", 'secret "later" not found')
    assert waiting["reason"] == "CreateContainerConfigError"
    assert (await m.pod("waits")).status["phase"] == "Pending"
    await m.secret("later", WORD="here")
    await m.until_phase("waits", "Succeeded")
    assert await m.log("waits") == ["here"]


async def test_missing_key_is_named(machine: Start) -> None:
    m = await machine()
    await m.secret("s", one="1")
    reference = {"name": "X", "valueFrom": {"secretKeyRef": {"name": "s", "key": "two"}}}
    await m.create("waits", "true", env=[reference])
    await m.until_waiting("waits", "couldn't find key two in Secret default/s")


async def test_command_is_needed_because_there_are_no_images(machine: Start) -> None:
    m = await machine()
    await m.create("image", command=[], args=["x"])
    await m.until_waiting("image", "container 'worker' has no command; local mode has no images")


async def test_containers_run_in_the_folder_of_the_job(machine: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('found')")
    m = await machine(workdir=tmp_path)
    await m.create("runs", "python", "train.py", workingDir="/workspace")
    await m.until_phase("runs", "Succeeded")
    assert await m.log("runs") == ["found"]


async def test_volumes_are_where_the_container_is_told(machine: Start) -> None:
    m = await machine()
    await m.secret("s", key="hidden")
    await m.config_map("c", run="echo ran")
    volumes = [
        {"name": "secret", "secret": {"secretName": "s", "items": [{"key": "key", "path": "deep/key"}]}},
        {"name": "config", "configMap": {"name": "c", "defaultMode": 0o755}},
        {"name": "scratch", "emptyDir": {"medium": "Memory"}},
        {"name": "about", "downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
    ]
    mounts = [{"name": v["name"], "mountPath": f"/mnt/{v['name']}"} for v in volumes]
    script = 'cat "$KEY" /mnt/about/name; /mnt/config/run; cd /mnt/scratch && echo kept > x && cat x; ls -l "$KEY"'
    env = [value("KEY", "/mnt/secret/deep/key"), value("OTHER", "/mnt/secrets file:///mnt/scratch")]
    await m.create("mounts", "sh", "-c", script, spec={"volumes": volumes}, volumeMounts=mounts, env=env)
    ended = await m.until_over("mounts")
    (first, second, third) = await m.log("mounts")
    assert ended["exitCode"] == 0
    assert (first, second) == ("hiddenmountsran", "kept")
    assert third.startswith("-rw-------")


async def test_unknown_volume_is_refused_by_name(machine: Start) -> None:
    m = await machine()
    volumes = [{"name": "data", "nfs": {"server": "x", "path": "/"}}]
    await m.create("claims", "true", spec={"volumes": volumes})
    await m.until_waiting("claims", "FailedMount: volume 'data': nfs does not exist in local mode")


async def test_pods_share_the_folder_of_a_claim_which_outlives_them(machine: Start, tmp_path: Path) -> None:
    m = await machine(claims=tmp_path / "claims")
    spec = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "shared"}}]}
    mounts = [{"name": "data", "mountPath": "/checkpoints"}]
    await m.create("writes", "sh", "-c", "echo kept > /checkpoints/x", spec=spec, volumeMounts=mounts)
    await m.until_phase("writes", "Succeeded")
    await m.create("reads", "cat", "/checkpoints/x", spec=spec, volumeMounts=mounts)
    await m.until_phase("reads", "Succeeded")
    assert await m.log("reads") == ["kept"]
    await m.delete("writes")
    assert (tmp_path / "claims" / "shared" / "x").read_text() == "kept\n"


async def test_claim_cannot_lead_out_of_the_folder_of_claims(machine: Start, tmp_path: Path) -> None:
    m = await machine(claims=tmp_path / "claims")
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "../other"}}]
    await m.create("escapes", "true", spec={"volumes": volumes})
    await m.until_waiting("escapes", "leads out of the volume")
    assert not (tmp_path / "other").exists()


async def test_key_cannot_lead_out_of_its_volume(machine: Start) -> None:
    m = await machine()
    await m.secret("s", key="x")
    volumes = [{"name": "v", "secret": {"secretName": "s", "items": [{"key": "key", "path": "a/b"}]}}]
    mounts = [{"name": "v", "mountPath": "/v", "subPath": "../../x"}]
    await m.create("escapes", "true", spec={"volumes": volumes}, volumeMounts=mounts)
    await m.until_waiting("escapes", "leads out of the volume")


def token_spec(seconds: int = 600) -> dict[str, Any]:
    source = {"serviceAccountToken": {"audience": "aud", "expirationSeconds": seconds, "path": "token"}}
    return {"volumes": [{"name": "t", "projected": {"sources": [source]}}], "serviceAccountName": "default"}


async def test_token_is_the_clusters_and_names_the_pod(machine: Start) -> None:
    m = await machine()
    mounts = [{"name": "t", "mountPath": "/var/run/secrets/t"}]
    env = [value("EVERSTEP_TOKEN_FILE", "/var/run/secrets/t/token")]
    script = 'cat "$EVERSTEP_TOKEN_FILE"; echo; exec sleep 600'
    pod = await m.create("asks", "sh", "-c", script, spec=token_spec(), volumeMounts=mounts, env=env)
    (token,) = await m.until_logged("asks", ".")
    review = await m.client.review_token(token, ("aud",))
    assert isinstance(review, TokenIdentity)
    assert (review.pod_name, review.pod_uid, review.namespace) == ("asks", pod.metadata.uid, "default")
    file = next(m.nodes.folder.rglob("token"))
    assert file.stat().st_mode & 0o077 == 0
    await m.delete("asks", grace=0)

    async def removed() -> bool:
        return not file.exists()

    await m.until("the token is removed", removed)


async def test_token_is_replaced_before_it_expires(tmp_path: Path) -> None:
    clock, cluster = ManualClock(), MemoryCluster(ManualClock())
    issued: list[int] = []

    async def issue(*claims: object) -> str:
        issued.append(1)
        if len(issued) == 2:
            raise ServerError("later")
        return f"token-{len(issued)}"

    starter = Starter(Host(cluster.client(), issue, clock, lambda: 0.5, Addresses()), tmp_path)
    pod = Unstructured(metadata=ObjectMeta(uid="u", name="p", namespace="default"), spec={"restartPolicy": "Never"})
    pod.spec.update(token_spec(seconds=1000), containers=[])
    await starter.prepare(pod, [])
    file = tmp_path / "volumes/t/token"
    seen = []
    for now in (799.0, 800.0, 801.0, 1600.0):  # issued, refused once, issued again, still good
        due = await starter.refresh(now)
        seen.append((file.read_text(), due))
    assert seen == [("token-1", 800.0), ("token-1", 801.0), ("token-3", 1601.0), ("token-3", 1601.0)]


async def test_peers_find_each_other_by_host_name(machine: Start) -> None:
    m = await machine()
    serve = (
        "import os, socket; s = socket.create_server((os.environ['IP'], 8123)); print('up', flush=True);"
        "c, _ = s.accept(); c.sendall(b'hello'); c.close()"
    )
    ask = (
        "import os, socket; h, p = os.environ['PEER'].split(':');"
        "print(socket.create_connection((h, int(p)), 10).recv(9).decode())"
    )
    ip = [field("IP", "status.podIP")]
    for number in (1, 2):  # the same port twice: each pod has an address of its own
        name = {"hostname": f"srv{number}", "subdomain": "jobs"}
        await m.create(f"server{number}", "python", "-c", serve, spec=name, env=ip)
        await m.until_logged(f"server{number}", "up")
        peer = [value("PEER", f"srv{number}.jobs.default.svc:8123")]
        await m.create(f"client{number}", "python", "-c", ask, env=peer)
    for number in (1, 2):
        await m.until_phase(f"client{number}", "Succeeded")
        assert await m.log(f"client{number}") == ["hello"]


async def test_rendezvous_of_two_jobs_have_ports_of_their_own(machine: Start) -> None:
    m = await machine()
    hold = 'echo "$PET_RDZV_ENDPOINT"; sleep 600'
    shown = {}
    for job in "ab":
        host = {"hostname": f"{job}-w0-0", "subdomain": f"{job}-workers"}
        for worker, spec, endpoint in (
            (1, {}, f"{job}-w0-0.{job}-workers.default.svc:29400"),
            (0, host, "localhost:29400"),
        ):
            name = f"{job}{worker}"
            await m.create(name, "sh", "-c", hold, spec=spec, env=[value("PET_RDZV_ENDPOINT", endpoint)])
            shown[name] = (await m.until_logged(name, ":"))[0]
    assert shown["a0"] == shown["a1"]
    assert shown["b0"] == shown["b1"]
    assert len({endpoint.split(":")[0] for endpoint in shown.values()}) == 2
    assert len({endpoint.split(":")[1] for endpoint in shown.values()}) == 2
    assert shown["a0"].split(":")[0] == (await m.pod("a0")).status["podIP"]
