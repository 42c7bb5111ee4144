"""Sends traces by OpenTelemetry's own exporter, OTLP over HTTP. Imported only where an endpoint is set.

The exporter is configured by its own variables, OTEL_*. Spans wait in a bounded queue, and a thread of its own sends
them: a collector that is slow or away costs spans, and neither a pass over a job nor the end of this process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from everstep.version import __version__
from everstep_operator.telemetry.recovery_trace import Outcome, RecoveryTrace

CLOSE_SECONDS = 2.0  # for what is queued, at the end of the process
_EPOCH = datetime.fromtimestamp(0, UTC)


class Traces:
    """One exporter, with its queue."""

    def __init__(self, instance: str) -> None:
        """`instance` distinguishes the replicas."""
        resource = Resource.create({"service.version": __version__, "service.instance.id": instance})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # none of the variables names it
            resource = resource.merge(Resource({SERVICE_NAME: "everstep-operator"}))
        # At the exit of Python it would wait for as long as the exporter may try.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("everstep_operator", __version__)

    def send(self, trace: RecoveryTrace) -> None:
        """Queue the spans of a trace. If the queue is full, the oldest spans are lost."""
        attributes: Mapping[str, str | int] = trace.attributes
        root = self._tracer.start_span(
            trace.recovery.name, Context(), attributes=attributes, start_time=_nanoseconds(trace.recovery.start)
        )
        within = set_span_in_context(root, Context())
        for stage in trace.stages:
            span = self._tracer.start_span(stage.name, within, start_time=_nanoseconds(stage.start))
            span.end(_nanoseconds(stage.end))
        if trace.outcome is not Outcome.RECOVERED:
            root.set_status(Status(StatusCode.ERROR, str(trace.outcome)))
        root.end(_nanoseconds(trace.recovery.end))

    def flush(self) -> None:
        """Send what is queued, now. It blocks."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send what is queued, if the collector takes it within `CLOSE_SECONDS`."""
        closing = threading.Thread(target=self._provider.shutdown, name="everstep-traces-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logging.getLogger("everstep.traces").warning("spans are lost: the collector did not take them in time")


def _nanoseconds(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1) * 1000
