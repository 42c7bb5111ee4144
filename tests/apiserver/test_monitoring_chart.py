"""What the chart has for Prometheus and Grafana: accepted by an API server with the Prometheus operator's kinds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import ROOT, TESTS
from testcluster import programs

pytestmark = pytest.mark.apiserver

NAMESPACE = "default"
KINDS = ("podmonitors", "prometheusrules", "servicemonitors")
SERVED = 30.0  # seconds until the API server serves new kinds
ALL = ("podMonitor", "prometheusRule", "dashboard")
RULES = "metrics.prometheusRule"


def rendered(helm: Any, *values: str, enabled: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    chosen = (*(f"metrics.{name}.enabled=true" for name in enabled), *values)
    flags = [part for value in chosen for part in ("--set", value)]
    text = helm("template", "everstep", "-n", NAMESPACE, "--no-hooks", *flags).stdout
    return [one for one in yaml.safe_load_all(text) if one]


def only(objects: list[dict[str, Any]], kind: str, name: str = "everstep") -> dict[str, Any]:
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(only(objects, "Deployment")["spec"]["template"])


def test_nothing_of_it_is_installed_unless_a_value_says_so(helm: Any) -> None:
    objects = rendered(helm)
    assert not {one["kind"] for one in objects} & {"PodMonitor", "ServiceMonitor", "PrometheusRule", "ConfigMap"}
    assert pod_of(objects)["metadata"]["annotations"]["prometheus.io/port"] == "8081"


@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
def test_objects_are_accepted_by_an_api_server_that_knows_their_kinds(
    helm: Any, monitoring_kinds: Any, monitor: str
) -> None:
    values = (
        "metrics.podMonitor.labels.team=a",
        "metrics.podMonitor.interval=30s",
        "metrics.serviceMonitor.interval=1m",
    )
    objects = rendered(helm, *values, enabled=(monitor, "prometheusRule", "dashboard"))
    flags = ("--dry-run=server", "--server-side", "--force-conflicts", "--validate=strict")
    done = monitoring_kinds.kubectl("apply", *flags, "-f", "-", input=yaml.safe_dump_all(objects))
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), "no warnings"
    assert "prometheus.io/scrape" not in pod_of(objects)["metadata"]["annotations"], "it would be scraped twice"


def test_monitors_choose_the_operators_pods_and_their_port_and_keep_the_labels_of_jobs(helm: Any) -> None:
    objects = rendered(helm, "metrics.podMonitor.labels.release=mine", enabled=("podMonitor",))
    monitor, pod = only(objects, "PodMonitor"), pod_of(objects)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert (ports[endpoint["port"]], endpoint["path"], endpoint["honorLabels"]) == (8081, "/metrics", True)
    assert "interval" not in endpoint
    assert monitor["metadata"]["labels"]["release"] == "mine"

    objects = rendered(helm, "metrics.serviceMonitor.interval=15s", enabled=("serviceMonitor",))
    monitor, pod = only(objects, "ServiceMonitor"), pod_of(objects)
    services = [one for one in objects if one["kind"] == "Service"]
    chosen = [
        s for s in services if monitor["spec"]["selector"]["matchLabels"].items() <= s["metadata"]["labels"].items()
    ]
    (endpoint,), (service,) = monitor["spec"]["endpoints"], chosen
    (port,) = service["spec"]["ports"]
    assert len(services) == 2, "the other one is that of the workers"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert (port["name"], ports[port["targetPort"]], port["port"]) == (endpoint["port"], 8081, 8081)
    assert (endpoint["honorLabels"], endpoint["interval"]) == (True, "15s")


def test_two_monitors_are_refused(helm: Any) -> None:
    flags = ("--set", "metrics.podMonitor.enabled=true", "--set", "metrics.serviceMonitor.enabled=true")
    assert "choose one" in helm("template", "everstep", *flags, expect_failure=True).stderr


def test_collector_of_traces_is_the_operators_if_a_value_names_one(helm: Any) -> None:
    def variables(*values: str) -> dict[str, str]:
        (container,) = pod_of(rendered(helm, *values))["spec"]["containers"]
        return {v["name"]: v.get("value", "") for v in container["env"] if v["name"].startswith("OTEL_")}

    assert variables() == {}
    endpoint = "http://collector.observability.svc:4318"
    assert variables(f"traces.endpoint={endpoint}") == {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    refused = helm("template", "everstep", "--set", "traces.endpoint=collector:4317", expect_failure=True).stderr
    assert "traces" in refused


def test_dashboard_is_the_file_with_the_side_cars_label(helm: Any) -> None:
    found = only(rendered(helm, enabled=("dashboard",)), "ConfigMap", "everstep-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    file = json.loads((ROOT / "charts/everstep/files/dashboard.json").read_text())
    assert json.loads(found["data"]["everstep.json"]) == file


def test_rules_have_the_thresholds_and_the_pages_that_the_values_say(helm: Any) -> None:
    numbers = {
        "jobStuckSeconds": 12345678,
        "checkpointSeconds": 7301,
        "jobRecoveriesPerHour": 17,
        "nodeLossesPerDay": 19,
    }
    values = [f"{RULES}.{name}={number}" for name, number in numbers.items()]
    values += [
        f"{RULES}.jobWaitSeconds=77",
        f"{RULES}.runbookUrl=https://wiki.example/x",
        f"{RULES}.labels.release=mine",
    ]
    found = only(rendered(helm, *values, enabled=("prometheusRule",)), "PrometheusRule")
    assert found["metadata"]["labels"]["release"] == "mine"
    (group,) = found["spec"]["groups"]
    alerts = {rule["alert"]: rule for rule in group["rules"]}
    names = ("JobStuck", "CheckpointOld", "JobRecoversAgain", "NodeBad")
    for name, number in zip(names, numbers.values(), strict=True):
        assert re.search(rf">=? {number}\b", alerts[f"Everstep{name}"]["expr"]), name
    assert alerts["EverstepJobWaits"]["for"] == "77s"
    assert alerts["EverstepJobStuck"]["annotations"]["runbook_url"] == "https://wiki.example/x/job-stuck.md"
    for rule in alerts.values():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {*rule["annotations"]} == {"summary", "description", "runbook_url"}


@pytest.mark.long
@pytest.mark.usefixtures("prometheus_programs")
def test_promtool_accepts_the_rules_and_they_fire_as_its_tests_say(helm: Any, tmp_path: Path) -> None:
    """The histories, and what fires in each, are in `alerts.yaml`."""
    promtool = programs.prometheus() / "promtool"
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump(only(rendered(helm, enabled=("prometheusRule",)), "PrometheusRule")["spec"])
    )
    shutil.copyfile(TESTS / "apiserver/alerts.yaml", tmp_path / "alerts.yaml")
    for command in (("check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"), ("test", "rules", "alerts.yaml")):
        done = subprocess.run(
            [promtool, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
