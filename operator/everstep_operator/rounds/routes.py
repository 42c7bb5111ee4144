"""The round store's HTTP calls, which `everstep.contract.rounds` describes.

It knows neither documents nor presences, only how a call reaches the round store and what its outcome is in HTTP.
Invariants: the job is the token's and never the request's; calls, watches and the memory of bodies are bounded; a
refused call has changed nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from aiohttp import web

from everstep.contract.document import MAX_BYTES, DocumentInvalid
from everstep.contract.fields import agent_name, short
from everstep.contract.messages import WIDEST
from everstep.contract.rounds import (
    DOCUMENT_PATH,
    EXPIRATIONS_HEADER,
    EXPIRATIONS_PARAMETER,
    GRACE_HEADER,
    LEADER_HEADER,
    MAX_JOIN_REQUEST_BYTES,
    MAX_WAIT,
    PRESENCE_PATH,
    TTL_HEADER,
    VERSION_HEADER,
)
from everstep_operator.endpoint.auth import Answer, RequestAuth, later
from everstep_operator.endpoint.callers import Caller, CallerRefused, CallerUnknown
from everstep_operator.endpoint.tenant_limits import Shares
from everstep_operator.rounds.agent_lookup import Agent
from everstep_operator.rounds.documents import RoundsRefused, RoundsUnavailable
from everstep_operator.rounds.job_rounds import VersionedDocument
from everstep_operator.rounds.presence import PresenceFull, PresenceRefused
from everstep_operator.rounds.registry import RoundRegistry
from everstep_operator.runtime.errors import NotLeading
from everstep_operator.telemetry.metrics import Metrics, ReportResult

log = logging.getLogger("everstep.rounds")

_JSON = "application/json"

# Of one replica at once. A job may use a third of either if no other job uses any. In the largest job, of 4,096 agents,
# each watches twice.
MAX_WATCHES, MAX_OTHER_CALLS = 32_768, 8192

Call: TypeAlias = Callable[[web.Request, Agent, Caller], Awaitable[web.Response]]


class RoundRoutes:
    """`agent` gives the agent that a caller is; it raises the errors of `agent_lookup.find_agent`."""

    def __init__(
        self,
        rounds: RoundRegistry,
        auth: RequestAuth,
        *,
        agent: Callable[[Caller], Awaitable[Agent]],
        metrics: Metrics,
    ) -> None:
        self._rounds, self._auth, self._agent, self._metrics = rounds, auth, agent, metrics
        self._calls, self._watches = Shares(MAX_OTHER_CALLS), Shares(MAX_WATCHES)

    def add_to(self, router: web.UrlDispatcher) -> None:
        presence = PRESENCE_PATH + "/{agent}"
        router.add_get(DOCUMENT_PATH, self._read_or_watch, allow_head=False)
        router.add_put(DOCUMENT_PATH, self._route("swap", self._swap))
        router.add_get(PRESENCE_PATH, self._route("present", self._present), allow_head=False)
        router.add_put(presence, self._route("announce", self._announce))
        router.add_post(presence, self._route("renew", self._renew))
        router.add_delete(presence, self._route("withdraw", self._withdraw))

    def _route(self, name: str, call: Call) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            async with self._auth.admitted(request, self._calls) as caller:
                response = await self._answer(request, caller, call)
            self._metrics.round_request(name, response.status)
            return response

        return handle

    async def _read_or_watch(self, request: web.Request) -> web.StreamResponse:
        """Answer reads and watches; there may be many more watches than reads."""
        if "wait" not in request.query:
            return await self._route("read", self._read)(request)
        async with self._auth.admitted(request, self._watches) as caller:
            self._metrics.round_watches(int(self._watches.used))
            response = await self._answer(request, caller, self._watch)
        self._metrics.round_watches(int(self._watches.used))
        self._metrics.round_request("watch", response.status)
        return response

    async def _answer(self, request: web.Request, caller: Caller | Answer, call: Call) -> web.Response:
        if isinstance(caller, Answer):
            return caller.response(request)
        who = {"pod": caller.identity.pod_name, "namespace": caller.identity.namespace}
        try:
            response = await call(request, await self._agent(caller), caller)
            # An agent whose other calls hang at a frozen leader sees by this that another one leads.
            response.headers[LEADER_HEADER] = self._auth.address_of_leader(request)
            return response
        except DocumentInvalid as e:
            answer = Answer(400, str(e), ReportResult.MALFORMED)
        except (RoundsRefused, PresenceRefused, CallerRefused) as e:
            log.debug("refused", extra={**who, "reason": str(e)})
            answer = Answer(403, str(e), ReportResult.FORBIDDEN)
        except (RoundsUnavailable, PresenceFull, CallerUnknown) as e:
            answer = later(str(e), ReportResult.UNAVAILABLE)
        except NotLeading as e:
            answer = self._auth.answer_of_follower(request) or later(str(e), ReportResult.NO_LEADER)
        except Exception:
            log.exception("a call failed in the operator", extra={**who, "path": request.path})
            answer = Answer(500, "the operator failed on this call; see its log", ReportResult.UNAVAILABLE)
        return answer.response(request)

    async def _read(self, request: web.Request, agent: Agent, _: Caller) -> web.Response:
        version, expirations = _known(request)
        versioned = await self._rounds.of(agent.job).read(version)
        return (
            web.Response(status=304)
            if (versioned.version, versioned.expirations) == (version, expirations)
            else _document_response(versioned)
        )

    async def _watch(self, request: web.Request, agent: Agent, _: Caller) -> web.Response:
        version, expirations = _known(request)
        wait = _seconds(request.query["wait"], "wait", MAX_WAIT)
        versioned = await self._rounds.of(agent.job).watch(agent.worker, version, expirations, wait)
        return web.Response(status=304) if versioned is None else _document_response(versioned)

    async def _swap(self, request: web.Request, agent: Agent, caller: Caller) -> web.Response:
        expected = _number(request.headers.get(VERSION_HEADER, ""), VERSION_HEADER)
        if self._rounds.of(agent.job).is_late(expected):
            return _outdated_response()  # without reading the body
        body = await self._auth.body(request, MAX_BYTES, caller)
        if isinstance(body, Answer):
            return body.response(request)
        version = await self._rounds.of(agent.job).swap(expected, body, stop_requested=agent.stop_requested)
        if version is None:
            return _outdated_response()
        return web.Response(status=204, headers={VERSION_HEADER: str(version)})

    async def _present(self, _: web.Request, agent: Agent, __: Caller) -> web.Response:
        return web.Response(body=await self._rounds.of(agent.job).present(agent.worker), content_type=_JSON)

    async def _announce(self, request: web.Request, agent: Agent, caller: Caller) -> web.Response:
        ttl = _seconds(request.headers.get(TTL_HEADER, ""), TTL_HEADER, float("inf"))
        body = await self._auth.body(request, MAX_JOIN_REQUEST_BYTES, caller)
        if isinstance(body, Answer):
            return body.response(request)
        rounds = self._rounds.of(agent.job)
        rounds.announce(agent.worker, _agent(request), body, ttl)
        grace = rounds.request_write(_agent(request))
        response = _document_response(await rounds.read(0))  # the agent would ask for the document next
        response.headers[GRACE_HEADER] = f"{grace:g}"
        return response

    async def _renew(self, request: web.Request, agent: Agent, _: Caller) -> web.Response:
        if self._rounds.of(agent.job).renew(agent.worker, _agent(request)):
            return web.Response(status=204)
        return web.json_response({"reason": "it has expired: announce it again"}, status=410)

    async def _withdraw(self, request: web.Request, agent: Agent, _: Caller) -> web.Response:
        self._rounds.of(agent.job).withdraw(agent.worker, _agent(request))
        return web.Response(status=204)


def _outdated_response() -> web.Response:
    return web.json_response({"reason": "another document is there: read it"}, status=412)


def _document_response(versioned: VersionedDocument) -> web.Response:
    headers = {VERSION_HEADER: str(versioned.version), EXPIRATIONS_HEADER: str(versioned.expirations)}
    if versioned.document is None:
        return web.Response(status=204, headers=headers)
    return web.Response(body=versioned.document.encode(), headers=headers, content_type=_JSON)


def _known(request: web.Request) -> tuple[int, int]:
    """The version and the count of expirations that the caller has seen."""
    query = request.query
    expirations = _number(query.get(EXPIRATIONS_PARAMETER, "-1"), EXPIRATIONS_PARAMETER, low=-1)
    return _number(query.get("version", "0"), "version"), expirations


def _agent(request: web.Request) -> str:
    return agent_name(request.match_info["agent"], "agent")


def _number(text: str, name: str, low: int = 0) -> int:
    digits = text.removeprefix("-") if low < 0 else text
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 19) or not low <= int(text) < WIDEST:
        raise DocumentInvalid(f"{name}: {short(text)} is no whole number from {low} to {WIDEST - 1}")
    return int(text)


def _seconds(text: str, name: str, most: float) -> float:
    try:
        seconds = float(text) if text.isascii() and len(text) <= 20 else float("nan")
    except ValueError:
        seconds = float("nan")
    if not 0 <= seconds < float("inf"):
        raise DocumentInvalid(f"{name}: {short(text)} is no finite number of seconds of at most 20 characters")
    return min(seconds, most)
