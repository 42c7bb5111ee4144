"""A real Prometheus scrapes a real operator, and the questions of the documentation are answered as the jobs are."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from support import ROOT
from support.apiserver.fleet import FAILURES, STUCK_AT, Fleet
from testcluster.prometheus import FORMATS, JOB, Prometheus, Sample

pytestmark = [pytest.mark.apiserver, pytest.mark.long, pytest.mark.usefixtures("prometheus_programs")]

PAGE = (ROOT / "docs/operations/observability.md").read_text()
LIMIT = 60.0  # seconds until an answer is right
STUCK = 5  # seconds without a step, in place of the page's 900
THRESHOLDS = {
    "jobStuckSeconds": STUCK,
    "checkpointSeconds": 5,
    "jobRecoveriesPerHour": FAILURES,
    "jobWaitSeconds": 0,
    "nodeLossesPerDay": FAILURES,
}
# What `$…` of the dashboard stands for, with the job that has all figures.
VARIABLES = {"$__rate_interval": "1m", '"$name"': '"fails"'}
PANELS = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in json.loads((ROOT / "charts/everstep/files/dashboard.json").read_text())["panels"]
    for target in panel.get("targets", ())
}
AT_WORK = {"trains", "unsaved", "fails"}


def question(begins: str) -> str:
    """The query that the page has behind the question that begins so."""
    (found,) = re.findall(rf"^{re.escape(begins)}.*?```promql\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def watched(crd: Any, helm: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Prometheus]]:
    """Prometheus looks on from the beginning: an increase is one that it has seen. It has the chart's alerts, with the
    thresholds of this test, without the times for which something has to last."""
    folder = tmp_path_factory.mktemp("watched")
    flags = [
        part for name, number in THRESHOLDS.items() for part in ("--set", f"metrics.prometheusRule.{name}={number}")
    ]
    enabled = ("--set", "metrics.prometheusRule.enabled=true", "-s", "templates/prometheusrule.yaml")
    rules = yaml.safe_load(helm("template", "everstep", *enabled, *flags).stdout)["spec"]
    for rule in rules["groups"][0]["rules"]:
        rule.pop("for", None)
        rule["expr"] = rule["expr"].replace("[5m]", "[15s]")
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    fleet = Fleet(crd, folder, lambda query: bool(server.query(query)))
    scraped = f"127.0.0.1:{fleet.replica.probe_port}"
    server = Prometheus(folder / "prometheus", [scraped], [folder / "rules.yaml"])
    try:
        server.start()
        with fleet:
            yield fleet, server
    finally:
        server.stop()
        fleet.replica.end()


@pytest.fixture
def fleet(watched: tuple[Fleet, Prometheus]) -> Fleet:
    return watched[0]


@pytest.fixture
def prometheus(watched: tuple[Fleet, Prometheus]) -> Prometheus:
    return watched[1]


def until(fleet: Fleet, what: str, ask: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    """Ask until the answer is right."""
    deadline = time.monotonic() + LIMIT
    while True:
        fleet.check()
        answer = ask()
        if holds(answer):
            return answer
        assert time.monotonic() < deadline, f"not within {LIMIT:.0f} s: {what}; the answer is {answer}"
        time.sleep(0.2)


def by_name(fleet: Fleet, samples: list[Sample]) -> dict[str, float]:
    """Of the jobs of this fleet: those that other tests left at the same API server are no part of it."""
    ours = [one for one in samples if one.labels.get("namespace") == fleet.namespace]
    return {one.labels["name"]: one.value for one in ours}


def test_both_formats_are_scraped_without_an_error(fleet: Fleet, prometheus: Prometheus) -> None:
    scraped = until(
        fleet,
        "each job has scraped",
        lambda: {one.labels["job"]: one.value for one in prometheus.query("scrape_samples_scraped")},
        lambda counts: counts.keys() == {JOB, *FORMATS} and min(counts.values()) > 0,
    )
    assert prometheus.scrape_errors() == dict.fromkeys((JOB, *FORMATS), "")
    assert min(scraped.values()) > 100
    assert [one.value for one in prometheus.query("min(up)")] == [1.0]


def test_stuck_jobs_are_named_and_no_others(fleet: Fleet, prometheus: Prometheus) -> None:
    query = question("Which jobs are stuck").replace("> 900", f"> {STUCK}")
    until(
        fleet,
        "the job without steps and the one without workers",
        lambda: by_name(fleet, prometheus.query(query)).keys(),
        lambda names: names == {"stuck", "waits"},
    )
    step = by_name(fleet, prometheus.query("everstep_job_step"))
    assert step["stuck"] == STUCK_AT
    for _ in range(10):  # those that train are never among them
        assert by_name(fleet, prometheus.query(query)).keys() == {"stuck", "waits"}
        time.sleep(0.2)


def test_age_of_the_newest_commit_is_that_of_each_job(fleet: Fleet, prometheus: Prometheus) -> None:
    ages = until(
        fleet,
        "all jobs that are to commit",
        lambda: by_name(fleet, prometheus.query(question("How old is the newest commit"))),
        lambda ages: ages.keys() == {*AT_WORK, "stuck", "waits"} and ages["trains"] < 3,
    )
    assert ages["unsaved"] == pytest.approx(time.time() - fleet.unsaved_since, abs=3)
    assert ages["waits"] > ages["unsaved"], "it counts from the job's start"


def test_cost_of_the_last_failure_is_the_time_that_it_took(fleet: Fleet, prometheus: Prometheus) -> None:
    cost = until(
        fleet,
        "the job that lost workers",
        lambda: by_name(fleet, prometheus.query(question("What did the last failure cost"))),
        lambda cost: cost.keys() == {"fails"},
    )
    stages = [fleet.last_recovery.get(f"{name}Ms", 0) for name in ("detect", "rendezvous", "restore", "firstStep")]
    assert cost["fails"] == pytest.approx(sum(stages) / 1000, abs=0.01)
    assert cost["fails"] == pytest.approx(fleet.failure_took, abs=1.5)  # the end of a container has whole seconds


def test_node_that_lost_the_workers_is_named(fleet: Fleet, prometheus: Prometheus) -> None:
    losses = until(
        fleet,
        "the node on which workers fail",
        lambda: {one.labels["node"]: one.value for one in prometheus.query(question("Which node is bad"))},
        lambda losses: losses.get(fleet.bad, 0) >= FAILURES,
    )
    assert fleet.good not in losses


def test_jobs_that_ended_are_counted_by_how_they_ended(fleet: Fleet, prometheus: Prometheus) -> None:
    until(
        fleet,
        "the job that is done and the one whose time was over",
        lambda: {
            one.labels["outcome"]: one.value for one in prometheus.query(question("How did the jobs of the last day"))
        },
        lambda ended: ended == {"Complete": 1, "DeadlineExceeded": 1},
    )


def test_first_recovery_of_a_job_is_an_increase(fleet: Fleet, prometheus: Prometheus) -> None:
    ours = f'namespace="{fleet.namespace}",cause="Signaled"'
    until(
        fleet,
        "each loss",
        lambda: by_name(fleet, prometheus.query(f"round(increase(everstep_job_recoveries_total{{{ours}}}[1h]))")),
        lambda recoveries: recoveries.get("fails") == FAILURES and recoveries.get("trains") == 0,
    )


def test_traces_at_the_collector_are_the_recoveries_of_the_status(fleet: Fleet) -> None:
    recoveries = until(fleet, "each loss has a trace", fleet.collector.recoveries, lambda all_: len(all_) == FAILURES)
    fields = {"detect": "detectMs", "form": "rendezvousMs", "restore": "restoreMs", "first-step": "firstStepMs"}
    root, children = recoveries[-1]
    assert {name: span.milliseconds for name, span in children.items()} == {
        name: fleet.last_recovery[field] for name, field in fields.items() if field in fleet.last_recovery
    }
    assert root.attributes["k8s.node.name"] == fleet.bad
    assert (root.end - root.start) / 1e9 == pytest.approx(fleet.failure_took, abs=1.5)


def test_share_that_was_not_productive_is_all_of_a_job_that_waits(fleet: Fleet, prometheus: Prometheus) -> None:
    shares = until(
        fleet,
        "all jobs",
        lambda: by_name(fleet, prometheus.query(question("How much of the last day"))),
        lambda shares: {"waits", "trains"} <= shares.keys() and shares["trains"] < 0.2,
    )
    assert shares["waits"] == pytest.approx(1.0)


@pytest.mark.parametrize("panel", PANELS)
def test_panel_of_the_dashboard_shows_something(fleet: Fleet, prometheus: Prometheus, panel: str) -> None:
    query = PANELS[panel]
    for variable, value in (*VARIABLES.items(), ("$namespace", fleet.namespace)):
        query = query.replace(variable, value)
    until(fleet, panel, lambda: prometheus.query(query), bool)


def test_alerts_fire_for_the_jobs_and_the_node_that_are_in_trouble_and_for_no_others(
    fleet: Fleet, prometheus: Prometheus
) -> None:
    def firing() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for labels in prometheus.firing():
            ours = labels.get("namespace", fleet.namespace) == fleet.namespace
            if ours and labels.get("node", fleet.bad) in (fleet.bad, fleet.good):
                found.setdefault(labels["alertname"].removeprefix("Everstep"), set()).add(
                    labels.get("name") or labels.get("node") or ""
                )
        return found

    wanted = {
        "JobStuck": {"stuck"},
        "CheckpointOld": {"unsaved", "fails"},
        "JobRecoversAgain": {"fails"},
        "JobWaits": {"waits"},
        "NodeBad": {fleet.bad},
    }
    until(fleet, "each alert", firing, lambda found: found == wanted)


def test_operator_that_is_gone_is_an_alert(fleet: Fleet, prometheus: Prometheus) -> None:
    """The last test of this file: it ends the operator."""
    fleet.end()
    deadline = time.monotonic() + LIMIT
    while "EverstepNobodyLeads" not in {labels["alertname"] for labels in prometheus.firing()}:
        assert time.monotonic() < deadline, prometheus.firing()
        time.sleep(0.2)
