"""The operator's HTTP server with progress reports alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from everstep.contract.messages import Report
from everstep_operator.endpoint.auth import RequestAuth
from everstep_operator.endpoint.reports import MAX_IN_FLIGHT, ReportEndpoint
from everstep_operator.endpoint.server import Check, EndpointServer, ServerOptions
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.telemetry.metrics import Metrics


def report_server(
    auth: RequestAuth,
    accept: Callable[[PodIdentity, Report], None] = lambda _pod, _report: None,
    metrics: Metrics | None = None,
    *,
    port: int = 0,
    ready: Mapping[str, Check] | None = None,
    max_in_flight: int = MAX_IN_FLIGHT,
) -> EndpointServer:
    """On loopback; `accept` gets each report with the pod that sent it."""
    metrics = metrics or Metrics(process=False)
    reports = ReportEndpoint(auth, lambda caller, report: accept(caller.identity, report), metrics, max_in_flight)
    options = ServerOptions(host="127.0.0.1", port=port)
    return EndpointServer([reports.add_to], metrics=metrics, ready=ready, options=options)
