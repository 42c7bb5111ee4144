"""The operator's HTTP server with progress reports alone."""

from __future__ import annotations

from collections.abc import Callable

from everstep.contract.messages import Report
from everstep_operator.endpoint.auth import RequestAuth
from everstep_operator.endpoint.connections import ConnectionBounds
from everstep_operator.endpoint.report_endpoint import MAX_IN_FLIGHT, ReportEndpoint
from everstep_operator.endpoint.server import HttpServer, ServerOptions, add_alive
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.telemetry.metrics import Metrics


def report_server(
    auth: RequestAuth,
    accept: Callable[[PodIdentity, Report], None] = lambda _pod, _report: None,
    metrics: Metrics | None = None,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
    max_in_flight: int = MAX_IN_FLIGHT,
    bounds: ConnectionBounds | None = None,
) -> HttpServer:
    """On loopback; `accept` gets each report with the pod that sent it."""
    metrics = metrics or Metrics(process=False)
    reports = ReportEndpoint(auth, lambda caller, report: accept(caller.identity, report), metrics, max_in_flight)
    options = ServerOptions(host=host, port=port, bounds=bounds or ConnectionBounds())
    return HttpServer([reports.add_to, add_alive], options)
