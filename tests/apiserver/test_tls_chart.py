"""TLS as the chart installs it: whose authority it is, who has its key, and that workers and operator agree by it."""

from __future__ import annotations

import base64
import ssl
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from everstep.contract import env
from everstep.contract.labels import TOKEN_AUDIENCE
from everstep.contract.messages import REPORT_PATH, Phase, Report
from support.apiserver.operators import NewPlace
from support.apiserver.replica import Replica
from testcluster.daemon import free_ports

pytestmark = pytest.mark.apiserver

ON = ("--set", "tls.enabled=true")


def rendered(helm: Any, *flags: str) -> dict[tuple[str, str], Any]:
    """The chart's objects by kind and name."""
    objects = [each for each in yaml.safe_load_all(helm("template", "everstep", *flags).stdout) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def pod_spec(objects: dict[tuple[str, str], Any]) -> Any:
    return objects["Deployment", "everstep"]["spec"]["template"]["spec"]


def variables(objects: dict[tuple[str, str], Any]) -> dict[str, str]:
    (container,) = pod_spec(objects)["containers"]
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def test_chart_without_tls_has_neither_its_port_nor_a_secret(helm: Any) -> None:
    objects = rendered(helm)
    assert not [key for key in objects if key[0] == "Secret"]
    assert [port["name"] for port in objects["Service", "everstep"]["spec"]["ports"]] == ["http"]
    assert variables(objects)["EVERSTEP_REPORT_URL"] == "http://everstep.default.svc"
    assert not {name for name in variables(objects) if "TLS" in name}


def test_authority_of_somebody_else_is_mounted_and_none_is_made(helm: Any) -> None:
    objects = rendered(helm, *ON, "--set", "tls.secretName=from-cert-manager,tls.plainCalls=false")
    assert not [key for key in objects if key[0] == "Secret"]
    (volume,) = [each for each in pod_spec(objects)["volumes"] if "secret" in each]
    assert volume["secret"]["secretName"] == "from-cert-manager"
    found = variables(objects)
    assert (found["EVERSTEP_REPORT_URL"], found["EVERSTEP_PLAIN_CALLS"]) == ("https://everstep.default.svc", "false")
    ports = {port["name"]: port["port"] for port in objects["Service", "everstep"]["spec"]["ports"]}
    assert ports == {"http": 80, "https": 443}
    policy = objects["NetworkPolicy", "everstep"]["spec"]["ingress"][0]
    assert [port["port"] for port in policy["ports"]] == ["http", "https"]


def test_name_of_the_charts_own_secret_is_refused_and_one_of_digits_is_a_text(helm: Any) -> None:
    refused = helm("template", "everstep", "--set", "tls.secretName=everstep-authority", expect_failure=True).stderr
    assert "tls.secretName: everstep-authority is the chart's own" in refused
    (volume,) = [
        each
        for each in pod_spec(rendered(helm, *ON, "--set-string", "tls.secretName=123"))["volumes"]
        if "secret" in each
    ]
    assert volume["secret"]["secretName"] == "123"


def test_pod_of_helm_test_has_no_key(helm: Any) -> None:
    spec = rendered(helm, *ON)["Pod", "everstep-test"]["spec"]
    (volume,) = spec["volumes"]
    assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert volume["secret"]["secretName"] == "everstep-authority"


async def test_upgrade_keeps_the_authority_that_running_workers_know(crd: Any, helm: Any, new_place: NewPlace) -> None:
    namespace = (await new_place()).namespace
    switched_off = [f"{name}=false" for name in ("crds.install", "policy.enabled", "operatorPolicy.enabled")]
    watches = [f"watchNamespaces={{{namespace}}}", "clusterRole.readNodes=false", "clusterRole.reviewTokens=false"]
    sets = [part for value in (*switched_off, *watches) for part in ("--set", value)]
    flags = ("-n", namespace, "--kubeconfig", str(crd.kubeconfig), *sets)

    def authority() -> Any:
        done = crd.kubectl("get", "secret", "everstep-authority", "-n", namespace, "-o", "yaml")
        return yaml.safe_load(done.stdout)["data"] if done.returncode == 0 else None

    helm("install", "everstep", *flags)
    assert authority() is None
    helm("upgrade", "everstep", *flags, *ON)
    first = authority()
    assert set(first) == {"ca.crt", "ca.key"}
    helm("upgrade", "everstep", *flags, *ON, "--set", "logLevel=debug")
    assert authority() == first
    helm("upgrade", "everstep", *flags)
    assert authority() == first, "it is there for who switches TLS on again"
    helm("upgrade", "everstep", *flags, *ON)
    assert authority() == first
    crd.kubectl("delete", "secret", "everstep-authority", "-n", namespace)
    helm("upgrade", "everstep", *flags, *ON)
    assert authority() not in (None, first), "another one is made where somebody has deleted it"


async def test_workers_get_the_charts_authority_and_reach_the_operator_by_it(
    crd: Any, helm: Any, new_place: NewPlace, tmp_path: Path
) -> None:
    place = await new_place()
    objects = rendered(helm, "-n", place.namespace, *ON)
    secret = tmp_path / "secret"
    secret.mkdir()
    for name, text in objects["Secret", "everstep-authority"]["data"].items():
        (secret / name).write_bytes(base64.b64decode(text))
    ca = (secret / "ca.crt").read_text()
    (port,) = free_ports(1)
    environ = variables(objects)
    del environ["EVERSTEP_PORT"], environ["EVERSTEP_PROBE_PORT"]
    environ |= {"EVERSTEP_TLS_DIR": str(secret), "EVERSTEP_TLS_PORT": str(port)}
    replica = Replica(crd, place.namespace, "replica-a", tmp_path, environ=environ)
    try:
        await place.create_job()
        await place.running("digits-w0-0", "digits-w1-0")
        pod = yaml.safe_load(crd.kubectl("get", "pod", "digits-w0-0", "-n", place.namespace, "-o", "yaml").stdout)
        (container,) = pod["spec"]["containers"]
        given = {each["name"]: each.get("value") for each in container["env"]}
        assert given[env.CA_CERTIFICATES] == ca
        host = f"everstep.{place.namespace}.svc"
        assert given[env.REPORT_URL] == f"https://{host}{REPORT_PATH}"

        bound = (
            "--bound-object-kind", "Pod", "--bound-object-name", "digits-w0-0",
            "--bound-object-uid", pod["metadata"]["uid"],
        )  # fmt: skip
        done = crd.kubectl("create", "token", "default", "-n", place.namespace, "--audience", TOKEN_AUDIENCE, *bound)
        assert done.returncode == 0, done.stderr
        trust = ssl.create_default_context(cadata=ca)
        report = Report(Phase.TRAIN, 0, 2, time.time(), round=1).encode()
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {done.stdout.strip()}"}) as session,
            session.post(
                f"https://127.0.0.1:{port}{REPORT_PATH}", data=report, ssl=trust, server_hostname=host
            ) as reply,
        ):
            assert reply.status == 204, await reply.text()
        metrics = replica.get("/metrics")
        (line,) = [each for each in metrics.splitlines() if each.startswith("everstep_certificate_end_timestamp")]
        assert 20 * 86400 < float(line.split()[1]) - time.time() < 31 * 86400
    finally:
        replica.end()


async def test_operator_without_a_usable_certificate_ends_and_says_why(
    crd: Any, new_place: NewPlace, tmp_path: Path
) -> None:
    place = await new_place()
    (tmp_path / "empty").mkdir()
    replica = Replica(
        crd, place.namespace, "replica-a", tmp_path, environ={"EVERSTEP_TLS_DIR": str(tmp_path / "empty")}
    )
    try:
        assert replica.process.wait(30) == 2
        (line,) = [line for line in replica.lines() if line["level"] == "error"]
        assert "has neither tls.crt and tls.key, nor ca.crt and ca.key" in line["reason"]
    finally:
        replica.end()
