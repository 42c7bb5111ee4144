"""The page over HTTP: what it shows of a run's folder, to whom, and what no text of a job can do."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from everstep.client import Checkpoint
from everstep.jobs.history import PodSeen, StatusSeen, StepSeen, encode, thinned
from everstep.jobs.timeline import build
from everstep.jobs.view import View, of_status
from everstep_local.run.page import LocalJobs, key_of, served
from everstep_operator.page import rows
from everstep_operator.page.links import LinkAccess
from everstep_operator.page.model import Detail, Fleet, JobUnknown, Listed, May, Stack, Unavailable
from everstep_operator.page.server import AT_ONCE, FOLDER, HEADERS, Page, server
from support.page import pictures
from support.page.folders import BEGAN, EVIL, STATUS, run_folder
from support.page.html import active_parts, parsed, table, words


@asynccontextmanager
async def reader(page: Page, access: LinkAccess) -> AsyncIterator[ClientSession]:
    """A reader that has opened the address with the token."""
    async with server(page, "127.0.0.1", 0) as listener, ClientSession(f"http://127.0.0.1:{listener.port}") as session:
        # aiohttp keeps no cookies of an address without a name.
        async with session.get("/", params={"token": access.token}, allow_redirects=False) as answer:
            assert answer.status == 303
            cookies = {name: morsel.value for name, morsel in answer.cookies.items()}
            assert all(morsel["httponly"] and morsel["samesite"] == "Strict" for morsel in answer.cookies.values())
        session.headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        yield session


@pytest.fixture(autouse=True)
def _no_other_runs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page lists the runs that live on this machine, too: those of another test, or of a person."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("live")))


@asynccontextmanager
async def of_runs(folder: Path) -> AsyncIterator[ClientSession]:
    access = LinkAccess()
    async with reader(Page(LocalJobs(str(folder)), access, "this machine"), access) as session:
        yield session


async def test_every_text_of_a_job_is_shown_as_text_and_can_run_nothing(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / EVIL.replace("/", ""))
    async with of_runs(tmp_path / "runs") as session:
        async with session.get("/") as answer:
            fleet = parsed(await answer.text())
        async with session.get(f"/jobs/{key_of(folder)}".replace("#", "%23")) as answer:
            job = parsed(await answer.text())
    assert not [*active_parts(fleet), *active_parts(job)]
    shown = " ".join(EVIL.split()).replace("\x1b", "\ufffd").replace("\u202e", "\ufffd")
    assert shown in words(fleet), "the message is in the list of jobs"
    for section in ("failure", "recoveries", "earlier-runs", "workers", "events", "conditions"):
        assert shown in words(next(e for e in job.iter("section") if e.get("aria-labelledby") == section)), section
    assert "alert(1)" in words(next(job.iter("svg")))
    assert "49" not in words(job).split(), "no template in a text is carried out"


async def test_job_shows_what_the_commands_print(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "digits-1", text="calm")
    async with of_runs(tmp_path / "runs") as session, session.get(f"/jobs/{key_of(folder)}") as answer:
        document = parsed(await answer.text())
    facts = {
        words(each.find("dt")): words(each.find("dd")) for each in document.iter("div") if each.find("dt") is not None
    }
    assert (facts["Step"], facts["Goodput"], facts["Last commit"]) == ("70 of 100", "50%", "step 60")
    assert "Lost if killed now" not in facts, "it is over"
    assert [row[:3] for row in table(document, "goodput")] == [
        ["productive", "5 min", "50.0 %"],
        ["replay", "1 min", "10.0 %"],
        ["detect", "30 s", "5.0 %"],
        ["form", "1 min 30 s", "15.0 %"],
        ["restore", "1 min", "10.0 %"],
        ["wait", "1 min", "10.0 %"],
    ]
    ((at, _, worker, _, rung, took, stages, lost),) = table(document, "recoveries")
    assert (at, worker, rung, took, lost) == ("2026-11-30 06:05:00 UTC", "1", "recreate", "5.0 s", "9")
    assert stages.endswith("detect 0.5 s, form 1.5 s, restore 2.0 s, first step 1.0 s")
    failed, complete = table(document, "earlier-runs")
    times = ["2026-11-29 06:00:00 UTC", "2026-11-29 06:02:05 UTC"]
    assert (failed[0], failed[2:]) == ("1", [*times, "2 min 5 s", "40", "30", "4"])
    assert complete[:2] == ["0", "Complete"]
    assert complete[4:] == ["–"] * 4, "what an older operator did not write"
    assert [row[0] for row in table(document, "events")] == ["2026-11-30 06:00:05 UTC"]
    drawn = words(next(document.iter("svg")))
    assert "worker 0" in drawn
    assert "calm" in drawn


async def test_long_timeline_can_be_seen_in_parts(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "digits-1", text="calm")
    with (folder / "history.jsonl").open("a") as file:
        file.write(encode(PodSeen(7000.0, "late", 3, 2, "n", "Pending")) + "\n")
        file.write(encode(StatusSeen(7200.0, "Running", "", 2, 2)) + "\n")
    async with of_runs(tmp_path / "runs") as session:
        lanes = {}
        for window in ("", "hour", "10min", "day", "x"):
            async with session.get(f"/jobs/{key_of(folder)}", params={"window": window}) as answer:
                document = parsed(await answer.text())
            links = [words(e) for e in document.iter("a") if str(e.get("id")).startswith("window-")]
            assert links == ["all", "last 10 minutes", "last hour"], "the last day is all"
            lanes[window] = [w for e in document.iter("text") if (w := words(e)).startswith("worker ")]
        assert lanes == {
            "": ["worker 0", "worker 3"], "hour": ["worker 3"], "10min": ["worker 3"], "day": ["worker 0", "worker 3"],
            "x": ["worker 0", "worker 3"],
        }  # fmt: skip


async def test_curves_have_the_points_of_the_timeline_and_a_gap_where_no_step_was_taken(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "runs" / "digits-1", text="Recovering")
    async with of_runs(tmp_path / "runs") as session, session.get(f"/series/{key_of(folder)}") as answer:
        series = await answer.json()
    assert series["world"] == [[0.0, 0], [3.1, 2]]
    assert series["loss"] == [[3.0, 2.0], [6.1, None]]
    assert series["seconds"] == 6.1


async def test_without_the_token_and_under_a_foreign_name_nothing_is_answered(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "digits-1", text="calm")
    async with served(LocalJobs(str(tmp_path / "runs")), None, 0) as address, ClientSession() as session:
        base, _, token = address.partition("?token=")
        rebound = {"Host": "evil.example"}
        for url, headers in ((base, {}), (f"{base}?token=x", {}), (f"{base}jobs/a", {}), (address, rebound)):
            async with session.get(url, headers=headers, allow_redirects=False) as answer:
                assert answer.status == 403
                assert "digits" not in await answer.text()
                assert answer.headers.items() >= HEADERS.items()
                assert token not in await answer.text()
        async with session.get(f"{base}/evil.example?token={token}", allow_redirects=False) as answer:
            assert answer.headers["Location"] == "/evil.example", "no other host"


async def test_every_link_leads_somewhere_and_what_is_not_there_is_said(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "digits-1")
    async with of_runs(tmp_path / "runs") as session:
        waiting, seen = ["/"], set()
        while waiting:
            path = waiting.pop()
            seen.add(path)
            async with session.get(path) as answer:
                assert answer.status == 200, path
                assert answer.headers.items() >= {**HEADERS, "Cache-Control": answer.headers["Cache-Control"]}.items()
                if answer.content_type != "text/html":
                    continue
                document = parsed(await answer.text())
            links = [e.get(name) for e in document.iter() for name in ("href", "src", "data-series") if e.get(name)]
            waiting += [link for link in links if link not in seen and link not in waiting and not link.startswith("#")]
        assert {path.split("/")[1] for path in seen} == {"", "jobs", "series", "static"}
        async with session.post("/jobs/none") as answer:
            assert answer.status == 405
        for path in ("/nothing", "/static/../page.css", "/static/%2e%2e/server.py", "/jobs/none", "/stacks/none"):
            async with session.get(path) as answer:
                assert answer.status == 404, path
                assert answer.headers.items() >= HEADERS.items()
                parsed(await answer.text())


def test_every_route_only_reads() -> None:
    router = web.Application().router
    Page(Given(), LinkAccess(), "test").add_to(router)
    assert {route.method for route in router.routes()} == {"GET", "HEAD"}


class Given:
    """Jobs as a test gives them."""

    def __init__(self, jobs: Sequence[Listed] = (), gate: asyncio.Event | None = None) -> None:
        self.jobs, self.gate = jobs, gate

    async def fleet(self, may: May) -> Fleet:
        if self.gate is not None:
            await self.gate.wait()
        return Fleet(self.jobs, ["one run does not answer"])

    async def detail(self, may: May, key: str) -> Detail:
        for each in self.jobs:
            if each.key == key:
                return Detail(each, each.view.events)
        raise JobUnknown(key)

    async def stacks(self, may: May, key: str) -> Sequence[Stack]:
        raise Unavailable("none of its processes can be asked")


def many(count: int) -> list[Listed]:
    start = datetime(2026, 11, 30, tzinfo=UTC)
    return [
        Listed(f"ns/j{n}", "ns", replace(View.unknown(f"j{n}"), began=(start + timedelta(seconds=n)).isoformat()))
        for n in range(count)
    ]


async def test_many_jobs_are_shown_in_parts_and_those_that_are_meant_are_found() -> None:
    access = LinkAccess()
    ended = {"conditions": [{"type": "Complete", "status": "True"}]}
    over = Listed("ns/old", "ns", replace(View.unknown("old"), status="Complete", raw_status=ended, began=BEGAN))
    async with reader(Page(Given([over, *many(250)]), access, "test"), access) as session:

        async def names(path: str) -> list[str]:
            async with session.get(path) as answer:
                return [words(row.find("th")) for row in list(parsed(await answer.text()).iter("tr"))[1:]]

        first, second, third = await names("/"), await names("/?page=2"), await names("/?page=3&q=&status=")
        assert [len(first), len(second), len(third)] == [100, 100, 51]
        assert first[0] == "j249", "the newest first"
        assert third[-1] == "old", "what has ended comes last"
        assert await names("/?q=J24") == [
            "j249",
            "j248",
            "j247",
            "j246",
            "j245",
            "j244",
            "j243",
            "j242",
            "j241",
            "j240",
            "j24",
        ]
        assert await names("/?status=Complete") == ["old"]
        for odd in ("/?page=0", "/?page=99999999", "/?page=x", "/?q=%00%ff&status=%3Cb%3E"):
            assert isinstance(await names(odd), list)


async def test_job_that_has_ended_wants_no_workers() -> None:
    """Not `0 of 0 (2 to 4)`, which reads as if something were missing."""
    status = {"conditions": [{"type": "Complete", "status": "True", "reason": "Succeeded"}]}
    live = replace(View.unknown("live"), ready=1, wanted=2, fewest=2, most=4)
    over = replace(View.unknown("over"), raw_status=status, fewest=2, most=4)
    access = LinkAccess()
    jobs = [Listed(each.job, "ns", each) for each in (live, over)]
    async with reader(Page(Given(jobs), access, "test"), access) as session:
        shown = {}
        for name in ("live", "over"):
            async with session.get(f"/jobs/{name}") as answer:
                facts = parsed(await answer.text()).iter("div")
            shown[name] = next(
                words(f.find("dd")) for f in facts if (dt := f.find("dt")) is not None and words(dt) == "Workers"
            )
    assert shown == {"live": "1 of 2 (2 to 4)", "over": "none"}


async def test_requests_have_a_bound_in_number_and_in_time() -> None:
    access, gate = LinkAccess(), asyncio.Event()
    async with reader(Page(Given(gate=gate), access, "test", seconds=5), access) as session:
        waiting = [asyncio.create_task(session.get("/")) for _ in range(AT_ONCE)]
        async with asyncio.timeout(20):
            while True:
                async with session.get("/jobs/none") as answer:
                    if answer.status == 503:
                        break
        assert answer.headers["Retry-After"] == "1"
        gate.set()
        assert [(await task).status for task in waiting] == [200] * AT_ONCE
    async with reader(Page(Given(gate=asyncio.Event()), access, "test", seconds=0.2), access) as session:
        async with session.get("/") as answer:
            assert answer.status == 504
        async with session.get("/stacks/ns/j") as answer:
            assert answer.status == 503
            assert "none of its processes can be asked" in await answer.text()


async def test_readers_that_send_half_a_request_or_take_no_answer_cost_others_nothing() -> None:
    access = LinkAccess()
    page = Page(Given(many(100)), access, "test")
    async with server(page, "127.0.0.1", 0) as listener, ClientSession() as session:
        stuck = [await asyncio.open_connection("127.0.0.1", listener.port, limit=1024) for _ in range(100)]
        request = f"GET /?token={access.token} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        for number, (_, writer) in enumerate(stuck):
            writer.write(request * 50 if number % 2 else request[:20])
        async with asyncio.timeout(20):
            for _ in range(10):
                async with session.get(f"http://127.0.0.1:{listener.port}/static/page.css") as answer:
                    assert answer.status == 200
        for _, writer in stuck:
            writer.close()


def running(**status: Any) -> View:
    return replace(of_status("j", {"progress": {"step": 70}, **status}, (), ()), began=BEGAN)


def test_what_a_kill_would_cost_is_said_in_steps_and_seconds() -> None:
    now = datetime(2026, 11, 30, 6, 10, tzinfo=UTC)
    committed = {"lastCommittedStep": 60, "committedAt": "2026-11-30T06:09:00Z"}
    assert rows.risk(running(checkpoint=committed), now) == rows.Risk(10, 60.0, "10 steps, 1 min of training")
    newer = Checkpoint(68, 3, "u", "2026-11-30T06:09:58Z", 2, 1, False, True, (), {})
    cut = replace(newer, step=69, complete=False)
    for status in ({"checkpoint": committed}, {}):
        assert rows.risk(running(**status), now, [cut, newer]) == rows.Risk(2, 2.0, "2 steps, 2.0 s of training")
    assert rows.risk(running(), now) == rows.Risk(70, 600.0, "all 70 steps: nothing is committed")
    same = {**committed, "lastCommittedStep": 70}
    assert rows.risk(running(checkpoint=same), now) == rows.Risk(0, 60.0, "nothing: the last step is committed")
    assert rows.risk(running(conditions=STATUS["conditions"]), now) is None
    assert rows.risk(View.unknown("j"), now) is None, "it has taken no step"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (12, "12 s"), (60, "1 min"), (303, "5 min 3 s"), (11_100, "3 h 5 min"), (187_200, "2 d 4 h")],
)
def test_spans_have_two_units_at_most(seconds: float, text: str) -> None:
    assert rows.span(seconds) == text


def test_timeline_of_many_workers_draws_those_that_lost_a_pod() -> None:
    history = [PodSeen(n / 10, f"p{n}", n, 1, "n", "Running") for n in range(200)]
    history += [PodSeen(30.0, "p150", 150, 1, "n", "Failed")]
    shown, left_out = rows.lanes(build(history))
    assert 150 in shown.lanes
    assert (len(shown.lanes), left_out) == (rows.LANES, 200 - rows.LANES)


def test_thinned_history_has_the_same_lanes_and_spans() -> None:
    history: list[Any] = [StatusSeen(0.0, "Running", "", 1, 2), PodSeen(0.1, "a", 0, 1, "n", "Running")]
    history += [StepSeen(1 + n / 100, "a", 0, 0, 2, n, 1.0, 1) for n in range(5000)]
    history += [StatusSeen(51.2, "Recovering", "", 1, 2)]
    history += [StepSeen(51.3 + n / 100, "a", 0, 0, 2, 5000 + n, 1.0, 1) for n in range(900)]
    history += [StepSeen(61 + n / 100, "a", 0, 0, 1, 6000 + n, 1.0, 2) for n in range(3000)]
    few = thinned(history, 500)
    assert len(few) < 700
    assert build(few).lanes == build(history).lanes
    assert build(few).spans == build(history).spans
    assert thinned(history[:100], 500) == history[:100]


def test_files_of_others_are_as_their_packages_have_them() -> None:
    vendor = FOLDER / "static/vendor"
    listed = dict(
        re.findall(r"^\| (\w+/\S+) \| `([0-9a-f]{64})` \|$", (vendor / "README.md").read_text(), re.MULTILINE)
    )
    there = {str(f.relative_to(vendor)): hashlib.sha256(f.read_bytes()).hexdigest() for f in vendor.glob("*/*")}
    assert listed == there


def test_operator_and_local_runs_load_nothing_of_the_page_while_it_is_off() -> None:
    modules = "everstep_operator.main, everstep_local.run.commands, everstep_local.run.running"
    script = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not [
        name for name in loaded if name.startswith(("jinja2", "everstep_operator.page", "everstep_local.run.page"))
    ]


def test_view_is_read_back_from_a_folder() -> None:
    view = running()
    assert View.from_json(json.loads(json.dumps(asdict(view)))) == view


async def test_pictures_of_the_documents_are_of_the_page_as_it_is_now() -> None:
    access = LinkAccess()
    async with reader(pictures.page(access), access) as session, session.get(pictures.JOB) as answer:
        wanted = pictures.digest(await answer.text())
    old = [each.name for each in pictures.PICTURES if pictures.digest_in(each.path.read_bytes()) != wanted]
    assert old == [], f"take them anew: {pictures.REWRITE}"
