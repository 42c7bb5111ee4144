"""The HTTP call by which a training process reports its progress.

It does not know what a report means: it passes the report on with its caller. Invariants: the caller comes from the
token alone, never from the body; a refusal says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiohttp import web

from everstep.contract.messages import MAX_REPORT_BYTES, REPORT_PATH, MessageError, Report
from everstep_operator.endpoint.auth import Answer, RequestAuth
from everstep_operator.endpoint.callers import Caller
from everstep_operator.endpoint.tenant_limits import Shares
from everstep_operator.errors import TerminalError
from everstep_operator.telemetry.metrics import Metrics, ReportResult

log = logging.getLogger("everstep.reports")

MAX_IN_FLIGHT = 4096  # reports handled at once; beyond its share of these a caller is answered 503


class ReportRefused(TerminalError):
    """`accept` raises it: the caller is known and may not report; the message is sent to it."""


class ReportEndpoint:
    def __init__(
        self,
        auth: RequestAuth,
        accept: Callable[[Caller, Report], None],
        metrics: Metrics,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        self._auth, self._accept, self._metrics = auth, accept, metrics
        self._in_flight = Shares(max_in_flight)

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post(REPORT_PATH, self._report)

    async def _report(self, request: web.Request) -> web.StreamResponse:
        async with self._auth.admitted(request, self._in_flight) as caller:
            answer = caller if isinstance(caller, Answer) else await self._answer(request, caller)
        self._metrics.report(answer.result)
        return answer.response(request)

    async def _answer(self, request: web.Request, caller: Caller) -> Answer:
        body = await self._auth.body(request, MAX_REPORT_BYTES, caller)
        if isinstance(body, Answer):
            return body
        try:
            report = Report.decode(body)
        except MessageError as e:
            return Answer(400, str(e), ReportResult.MALFORMED)
        who = {"namespace": caller.identity.namespace, "pod": caller.identity.pod_name}
        try:
            self._accept(caller, report)
        except ReportRefused as e:
            log.debug("report refused", extra={**who, "reason": str(e)})
            return Answer(403, str(e), ReportResult.FORBIDDEN)
        except Exception:
            log.exception("report failed in the operator", extra={**who, "round": report.round})
            return Answer(500, "the operator failed on this report; see its log", ReportResult.UNAVAILABLE)
        return Answer(204, "", ReportResult.ACCEPTED)
