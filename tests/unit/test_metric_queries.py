"""What the alerts, the dashboard and the pages ask of Prometheus: each metric and label is one that the operator has.

Whether the queries give what they should is seen with a real Prometheus (`tests/apiserver/operator`).
"""

from __future__ import annotations

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from everstep_operator.telemetry import job_metrics
from everstep_operator.telemetry.job_metrics import ClusterFigures, JobFigures
from everstep_operator.telemetry.metrics import Metrics
from support import ROOT

PAGE = ROOT / "docs/operations/observability.md"
ALERTS = ROOT / "docs/operations/alerts"
RULES = ROOT / "charts/everstep/templates/prometheusrule.yaml"
DASHBOARD = ROOT / "charts/everstep/files/dashboard.json"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}
NAME = re.compile(r"\beverstep_\w+")
SELECTED = re.compile(r"\b(everstep_\w+)\{([^{}]*)\}")
MATCHED = re.compile(r'__name__=~"([^"]*)"')
LABEL = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')


def families() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each metric, as the reference page shows them."""
    found = {f.name: (f.kind, set(f.labels)) for f in Metrics(process=False).families}
    found |= {f.name: (f.kind, set(f.lines.labels)) for f in job_metrics.FAMILIES}
    return {name + ("_total" if kind == "counter" else ""): (kind, labels) for name, (kind, labels) in found.items()}


def samples() -> dict[str, set[str]]:
    """The labels of each series."""
    return {
        name + suffix: labels | ({"le"} if suffix == "_bucket" else set())
        for name, (kind, labels) in families().items()
        for suffix in SUFFIXES.get(kind, ("",))
    }


def whole() -> Metrics:
    """Metrics with a job that has each figure."""
    figures = {"seconds": {"wait": 1.0}, "recoveries": {"Error": 1}, "recovery_seconds": {"detect": 1.0}}
    numbers = dict.fromkeys(
        ("start", "step", "last_step", "commit_step", "last_commit", "goodput", "recovery_lost_steps"), 1
    )
    metrics = Metrics(process=False)
    metrics.figures_from(lambda: ClusterFigures((JobFigures("ns", "job", **numbers, **figures),), 0, {"n1": 1}))  # type: ignore[arg-type]
    return metrics


def test_each_exported_metric_has_the_type_and_the_labels_that_the_page_shows() -> None:
    exported = list(text_string_to_metric_families(whole().render().decode()))
    types = {f.name + ("_total" if f.type == "counter" else ""): f.type for f in exported}
    assert {name: type_ for name, type_ in types.items() if not name.endswith("_created")} == {
        name: kind for name, (kind, _) in families().items()
    }
    labels = {s.name: {*s.labels} for f in exported for s in f.samples if not s.name.endswith("_created")}
    assert labels == {name: samples()[name] for name in labels}


def queries() -> dict[str, str]:
    """The texts in which metrics are named, by where they are."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = {f"panel {p['title']} {t['refId']}": t["expr"] for p in panels for t in p.get("targets", ())}
    found |= {f"rules {n}": text for n, text in enumerate(RULES.read_text().split("- alert:"))}
    for page in (PAGE, *sorted(ALERTS.glob("*.md"))):
        blocks = re.findall(r"```promql\n(.*?)```", page.read_text(), re.DOTALL)
        found |= {f"{page.name} {n}": text for n, text in enumerate(blocks)}
    return found


@pytest.mark.parametrize("where", queries())
def test_query_names_only_metrics_and_labels_that_the_operator_has(where: str) -> None:
    text, known = queries()[where], samples()
    for pattern in MATCHED.findall(text):
        matched = [name for name in known if re.fullmatch(pattern, name)]
        assert len(matched) == pattern.count("|") + 1, pattern
    plain = MATCHED.sub("", text)
    assert set(NAME.findall(plain)) <= known.keys()
    for name, matchers in SELECTED.findall(plain):
        assert set(LABEL.findall(matchers)) <= known[name], name
    code = re.sub(r'"[^"]*"|#.*', "", text)
    assert [code.count(one) for one in "([{"] == [code.count(one) for one in ")]}"]


def test_each_alert_has_its_page_and_each_page_its_alert() -> None:
    pages = set(re.findall(r"runbook_url: \{\{ \.runbookUrl \}\}/(\S+)\.md", RULES.read_text()))
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    assert {path.stem for path in ALERTS.glob("*.md")} == {*pages, "README"}
    assert len(alerts) == len(pages)
    for alert in alerts:
        page = ALERTS / f"{re.sub('(?<!^)(?=[A-Z])', '-', alert.removeprefix('Everstep')).lower()}.md"
        assert page.read_text().startswith(f"# {alert}\n"), page
        assert f"({page.name})" in (ALERTS / "README.md").read_text()


def test_dashboard_has_no_two_panels_in_one_place() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    cells = [
        (x, y)
        for g in (p["gridPos"] for p in panels)
        for x in range(g["x"], g["x"] + g["w"])
        for y in range(g["y"], g["y"] + g["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({p["id"] for p in panels}) == len(panels)
    assert all(t["datasource"]["uid"] == "${datasource}" for p in panels for t in p.get("targets", ()))
