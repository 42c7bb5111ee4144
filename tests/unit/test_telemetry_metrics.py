"""Metrics: names, values, and label sets that no input can grow."""

import time

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from everstep_operator.api.conditions import Cause, FailedReason, Rung
from everstep_operator.telemetry.job_metrics import ClusterFigures, JobFigures
from everstep_operator.telemetry.metrics import STATUSES, Format, Metrics, ReportResult


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *(s.labels[k] for k in sorted(s.labels))): s.value for f in families for s in f.samples}


def test_everything_that_happened_is_rendered() -> None:
    m = Metrics(process=False)
    m.reconciled(0.02)
    m.reconciled(3, failed=True)
    m.api_request("create", "pods", 201, 0.01)
    m.api_request("get", "pods", "error")
    m.recovered("NodeLost", "recreate", 4.2)
    m.recovered("NodeLost", "regrow", None)
    m.report(ReportResult.ACCEPTED)
    m.leader(True)
    m.queue_depth(7)
    m.queue_wait(0.3)
    m.write_wait("create", 0.02)
    m.peak_memory(2**30, 5)
    m.relisted("pods")
    got = samples(m)
    assert got["everstep_reconcile_seconds_count",] == 2
    assert got["everstep_reconcile_errors_total",] == 1
    assert got["everstep_api_requests_total", "201", "pods", "create"] == 1
    assert got["everstep_api_requests_total", "error", "pods", "get"] == 1
    assert got["everstep_api_request_seconds_count", "create"] == 1
    assert got["everstep_recoveries_total", "NodeLost", "recreate"] == 1
    assert got["everstep_recoveries_total", "NodeLost", "regrow"] == 1
    assert (got["everstep_recovery_seconds_sum",], got["everstep_recovery_seconds_count",]) == (4.2, 1)
    assert got["everstep_reports_total", "accepted"] == 1
    assert got["everstep_leader",] == 1
    assert got["everstep_queue_depth",] == 7
    assert (got["everstep_queue_wait_seconds_sum",], got["everstep_queue_wait_seconds_count",]) == (0.3, 1)
    assert got["everstep_write_wait_seconds_count", "create"] == 1
    assert got["everstep_process_peak_memory_bytes", "host"] == 2**30
    assert got["everstep_process_peak_memory_bytes", "device"] == 5
    assert got["everstep_informer_relists_total", "pods"] == 1


def test_what_has_not_happened_is_zero_so_that_the_first_time_is_an_increase() -> None:
    m = Metrics(process=False)
    ends = {key[1]: value for key, value in samples(m).items() if key[0] == "everstep_jobs_ended_total"}
    assert ends == dict.fromkeys(("Complete", *FailedReason), 0)
    recoveries = [value for key, value in samples(m).items() if key[0] == "everstep_recoveries_total"]
    assert recoveries == [0] * (len(Cause) * len(Rung))
    for outcome in ("Complete", "NoProgress", "no reason of ours"):
        m.ended(outcome)
    counted = [samples(m)["everstep_jobs_ended_total", word] for word in ("Complete", "NoProgress", "other")]
    assert counted == [1, 1, 1]


def test_status_without_jobs_falls_back_to_zero() -> None:
    m = Metrics(process=False)
    m.jobs({"Running": 3, "Pending": 1})
    m.jobs({"Running": 2})
    got = samples(m)
    assert [got["everstep_jobs", s] for s in ("Running", "Pending", "Failed")] == [2, 0, 0]


def test_words_outside_the_set_add_no_series() -> None:
    m = Metrics(process=False)
    for i in range(1000):
        m.api_request(f"verb{i}", f"res{i}", 600 + i, 0.1)
        m.recovered(f"cause{i}", f"rung{i}", 1.0)
        m.jobs({f"status{i}": 1, f"other{i}": 1})
    got = samples(m)
    assert got["everstep_api_requests_total", "other", "other", "other"] == 1000
    assert got["everstep_recoveries_total", "other", "other"] == 1000
    assert got["everstep_jobs", "other"] == 2
    assert sum(key[0] == "everstep_jobs" for key in got) == len(STATUSES) + 1


def test_two_instances_share_nothing() -> None:
    a, b = Metrics(process=False), Metrics(process=False)
    a.leader(True)
    assert samples(b)["everstep_leader",] == 0


def test_process_metrics_are_included_on_request() -> None:
    assert ("process_resident_memory_bytes",) in samples(Metrics())


def full(number: int) -> JobFigures:
    return JobFigures(
        f"team-{number % 20}",
        f"job-{number}",
        workers=7,
        workers_wanted=8,
        start=1.5e9,
        step=12345 + number,
        last_step=1.6e9 + 0.25,
        commit_step=12000,
        last_commit=1.7e9,
        goodput=0.875,
        seconds=dict.fromkeys(("productive", "replay", "detect", "form", "restore", "wait", "unknown"), 1234.5),
        recoveries={"NodeLost": 2, "OOMKilled": 1},
        recovery_seconds={"detect": 1.5, "rendezvous": 2.0, "restore": 0.5, "first-step": 3.25},
        recovery_lost_steps=40,
    )


def test_both_formats_have_the_same_samples_and_are_read_by_their_parsers() -> None:
    m = Metrics()
    m.reconciled(0.02)
    m.api_request("create", "pods", 201, 0.01)
    m.figures_from(lambda: ClusterFigures((full(1), JobFigures("a", "b")), 3, {'no"de\\\n': 4}, {'no"de\\\n': 2}))
    plain = text_string_to_metric_families(m.render().decode())
    modern = openmetrics.text_string_to_metric_families(m.render(Format.OPENMETRICS).decode())

    def key(samples: list[Sample]) -> set[object]:
        return {(s.name, tuple(sorted(s.labels.items()))) for s in samples}

    old, new = [s for f in plain for s in f.samples], [s for f in modern for s in f.samples]
    assert key(old) == key(new)
    assert len(key(old)) == len(old) == len(new)
    values = {(s.name, *s.labels.values()): s.value for s in new}
    job = ("team-1", "job-1")
    assert values["everstep_job_step", *job] == 12346
    assert values["everstep_job_last_step_timestamp_seconds", *job] == 1.6e9 + 0.25
    assert values["everstep_job_recoveries_total", *job, "OOMKilled"] == 1
    assert values["everstep_job_last_recovery_seconds", *job, "first-step"] == 3.25
    assert values["everstep_jobs_without_series",] == 3
    assert values["everstep_node_losses_total", 'no"de\\\n'] == 4
    assert values["everstep_node_excluding_jobs", 'no"de\\\n'] == 2
    assert ("everstep_job_step", "a", "b") not in values


@pytest.mark.parametrize("format_", Format)
def test_thousand_jobs_and_nodes_stop_the_event_loop_for_at_most_100_ms(format_: Format) -> None:
    m = Metrics()
    figures = ClusterFigures([full(i) for i in range(1000)], 0, {f"node-{i}": i for i in range(1000)})
    m.figures_from(lambda: figures)
    m.render(format_)
    took = []
    for _ in range(5):
        began = time.process_time()
        m.render(format_)
        took.append(time.process_time() - began)
    assert min(took) < 0.1
