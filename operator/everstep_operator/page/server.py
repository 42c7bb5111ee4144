"""Answers the page's requests with HTML made on this server.

Invariants: no route changes anything but the reader's own cookie; every text is escaped by the templates, and the
headers forbid what is not a file of this server; a request has a bound in size and time, and so has the number of those
that are under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import jinja2
from aiohttp import web

from everstep.jobs.drawing import draw, text
from everstep.jobs.timeline import build, since
from everstep.jobs.view import age, byte_size, condition, ended
from everstep_operator.endpoint.connections import ConnectionBounds
from everstep_operator.endpoint.server import HttpServer, ServerOptions
from everstep_operator.page import rows
from everstep_operator.page.model import Access, Detail, Jobs, JobUnknown, May, Unavailable

log = logging.getLogger("everstep.page")

FOLDER = Path(__file__).parent
# Of a browser each page takes two or three connections; nobody is admitted on one.
BOUNDS = ConnectionBounds(strangers=64, total=128)
AT_ONCE = 8  # requests; the next ones are answered 503
SECONDS = 20.0  # for one request: reviews, reads, the template
STACKS_SECONDS = 20.0  # more where processes are asked
JOBS, EVENTS, WORKERS, COMMITS = 100, 200, 200, 50  # rows of a table
POINTS = 2000  # of a curve
MAX_TEXT = 100  # characters of what is searched for
RENEW_SECONDS = 5
# Parts of a timeline, from its end: by the word in the address, seconds and what a reader sees.
WINDOWS = {"10min": (600, "last 10 minutes"), "hour": (3600, "last hour"), "day": (86_400, "last day")}
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "vendor/htmx/htmx.min.js": "text/javascript",
    "vendor/uplot/uPlot.iife.min.js": "text/javascript",
    "vendor/uplot/uPlot.min.css": "text/css",
}

# HTML has no control characters but these three, and a text must not change the direction of what follows it.
NOT_SHOWN = {
    **dict.fromkeys([*range(32), *range(0x7F, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], "\ufffd"),
    **dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"),
    **{ord(kept): kept for kept in "\t\n\r"},
}

Answer: TypeAlias = Callable[[web.Request, May], Awaitable[web.Response]]


class Page:
    """The routes of the page. `name` is what it is about: a cluster's operator, or this machine."""

    def __init__(self, jobs: Jobs, access: Access, name: str, *, seconds: float = SECONDS) -> None:
        """`seconds`: for one request."""
        self._jobs, self._access, self._name, self._seconds = jobs, access, name, seconds
        self._under_way = 0
        self._files = {path: (FOLDER / "static" / path).read_bytes() for path in FILES}
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            finalize=lambda value: value.translate(NOT_SHOWN) if isinstance(value, str) else value,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "shown": rows.shown, "span": rows.span, "size": byte_size, "kind": rows.kind, "utc": rows.utc,
            "path": lambda key: quote(key, safe="/"), "figure": lambda value: f"{value:.4g}",
        }  # fmt: skip

    def add_to(self, router: web.UrlDispatcher) -> None:
        self._access.add_to(router)
        router.add_get("/static/{path:.+}", self._static)
        router.add_get("/", self._guarded(self._fleet))
        router.add_get("/jobs/{key:.+}", self._guarded(self._job))
        router.add_get("/series/{key:.+}", self._guarded(self._series))
        router.add_get("/stacks/{key:.+}", self._guarded(self._stacks, self._seconds + STACKS_SECONDS))
        router.add_get("/{path:.*}", self._guarded(self._missing))

    def render(self, template: str, request: web.Request, code: int = 200, **values: Any) -> web.Response:
        """HTML with the headers of every answer."""
        values = {"page_name": self._name, "reader": self._access.shown(request), "renew": RENEW_SECONDS, **values}
        body = self._templates.get_template(template).render(values)
        return web.Response(text=body, content_type="text/html", status=code, headers=HEADERS)

    def _guarded(
        self, answer: Answer, seconds: float | None = None
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        bound = self._seconds if seconds is None else seconds

        async def handle(request: web.Request) -> web.Response:
            if self._under_way >= AT_ONCE:
                text_ = f"{AT_ONCE} other requests are under way: reload this page in a moment"
                busy = self._problem(request, 503, "Busy", text_)
                busy.headers["Retry-After"] = "1"
                return busy
            self._under_way += 1
            try:
                async with asyncio.timeout(bound):
                    admitted = await self._access.admit(request)
                    if isinstance(admitted, web.Response):
                        admitted.headers.update(HEADERS)
                        return admitted
                    return await answer(request, admitted)
            except JobUnknown:
                return self._problem(request, 404, "No such job", "There is no such job, or you may not see it.")
            except Unavailable as e:
                return self._problem(request, 503, "Not available", str(e))
            except TimeoutError:
                return self._problem(request, 504, "Too slow", f"There was no answer within {bound:g} s.")
            except web.HTTPException:
                raise
            except Exception:
                log.exception("the page failed", extra={"path": request.path})
                return self._problem(request, 500, "Failed", "The page failed on this request: its log has the reason.")
            finally:
                self._under_way -= 1

        return handle

    def _problem(self, request: web.Request, status: int, title: str, problem: str) -> web.Response:
        return self.render("problem.html", request, status, title=title, problem=problem)

    async def _static(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        if path not in FILES:
            return self._problem(request, 404, "No such file", "This server has no such file.")
        headers = {**HEADERS, "Cache-Control": "private, max-age=3600"}
        return web.Response(body=self._files[path], content_type=FILES[path], charset="utf-8", headers=headers)

    async def _missing(self, request: web.Request, _: May) -> web.Response:
        return self._problem(request, 404, "No such page", "This server has no such page.")

    async def _fleet(self, request: web.Request, may: May) -> web.Response:
        fleet, now = await self._jobs.fleet(may), datetime.now(UTC)
        wanted, status = (request.query.get(name, "")[:MAX_TEXT] for name in ("q", "status"))
        chosen = rows.fleet(fleet.jobs, wanted, status)
        pages = max(1, -(-len(chosen) // JOBS))
        number = request.query.get("page", "1")
        page = min(pages, max(1, int(number))) if number.isdecimal() and len(number) < 6 else 1
        shown = chosen[(page - 1) * JOBS : page * JOBS]
        return self.render(
            "fleet.html", request,
            rows=[rows.row(each, now) for each in shown], count=len(chosen), all=len(fleet.jobs), page=page,
            pages=pages, wanted=wanted, status=status, statuses=sorted({each.view.status for each in fleet.jobs}),
            notes=fleet.notes, now=now.isoformat(),
        )  # fmt: skip

    async def _job(self, request: web.Request, may: May) -> web.Response:
        detail, now = await self._jobs.detail(may, request.match_info["key"]), datetime.now(UTC)
        window = request.query.get("window", "")
        return self.render("job.html", request, **_facts(detail, now, window if window in WINDOWS else ""))

    async def _series(self, request: web.Request, may: May) -> web.Response:
        """What the curves show, in seconds since the job began."""
        timeline = build((await self._jobs.detail(may, request.match_info["key"])).history)
        every = max(1, -(-len(timeline.loss) // POINTS))
        shown: list[tuple[float, float | None]] = [(at, loss) for at, _, loss in timeline.loss[::every]]
        body = {
            "seconds": timeline.seconds,
            "world": timeline.world,
            # A line through a time without steps would show a loss that was never measured.
            "loss": sorted([*shown, *((span.begin, None) for span in timeline.spans)], key=lambda point: point[0]),
        }
        return web.json_response(body, headers=HEADERS)

    async def _stacks(self, request: web.Request, may: May) -> web.Response:
        key = request.match_info["key"]
        return self.render("stacks.html", request, key=key, stacks=await self._jobs.stacks(may, key))


def _facts(detail: Detail, now: datetime, window: str) -> dict[str, Any]:
    """The values of the template of one job. `window`: the part of the timeline, one of `WINDOWS`, or all."""
    view = detail.listed.view
    whole = build(detail.history)
    windows = {name: words for name, (seconds, words) in WINDOWS.items() if seconds < whole.seconds}
    if window in windows:
        timeline, left_out = rows.lanes(since(whole, whole.seconds - WINDOWS[window][0]))
    else:
        timeline, left_out = rows.lanes(whole)
    title = f"Timeline of {view.job}: what each worker did, and when the world stood still"
    conditions = view.raw_status.get("conditions") or ()
    return {
        "detail": detail,
        "view": view,
        "key": detail.listed.key,
        "where": detail.listed.where,
        "goodput": rows.goodput(view, now),
        "ready": rows.workers(view),
        "ended": ended(view.raw_status),
        "recoveries": rows.recoveries(view),
        "earlier_runs": rows.earlier_runs(view),
        "risk": rows.risk(view, now, detail.commits or ()),
        "commit_age": age(view.committed_at, now),
        "committed_at": view.committed_at,
        "drawing": draw(timeline, title) if timeline.lanes else "",
        "drawing_text": text(timeline) if timeline.lanes else "",
        "left_out": left_out,
        "window": window if window in windows else "",
        "windows": windows,
        "workers": view.workers[:WORKERS],
        "more_workers": max(0, len(view.workers) - WORKERS),
        "events": list(reversed(detail.events))[:EVENTS],
        "more_events": max(0, len(detail.events) - EVENTS),
        "commits": None if detail.commits is None else detail.commits[:COMMITS],
        "more_commits": max(0, len(detail.commits or ()) - COMMITS),
        "conditions": conditions,
        "failure": view.raw_status.get("failure"),
        "straggler": (view.raw_status.get("progress") or {}).get("straggler"),
        "waits": condition(view.raw_status, "Ready").get("lastTransitionTime"),
        "metrics": (view.raw_status.get("progress") or {}).get("metrics") or {},
        "now": now.isoformat(),
    }


def server(page: Page, host: str, port: int) -> HttpServer:
    """A listener of its own, with the page's bounds. Port 0: any free one."""
    return HttpServer([page.add_to], ServerOptions(host=host, port=port, bounds=BOUNDS, backlog=64))
