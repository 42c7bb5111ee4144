"""The page of an operator before a real API server: whose token may read what, by the cluster's own reviews."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientConnectionError, ClientSession

from everstep_operator.controller.caches import Caches
from everstep_operator.main import JOBS
from everstep_operator.page import reviews
from everstep_operator.page.in_operator import page_server
from everstep_operator.page.server import HEADERS
from everstep_operator.runtime.clock import SystemClock, cancel
from support.apiserver.operators import NewPlace, Operators, Place
from support.apiserver.waiting import eventually
from support.page.html import active_parts, parsed, table, words
from testcluster.controlplane import ControlPlane
from testcluster.daemon import free_ports

pytestmark = pytest.mark.apiserver

EVIL = "<script>alert(1)</script>"
ROLE = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "reads-jobs"}}


def kubectl(plane: ControlPlane, *arguments: str, input: str | None = None) -> str:
    done: subprocess.CompletedProcess[str] = plane.kubectl(*arguments, input=input)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def allow(plane: ControlPlane, namespace: str, verbs: list[str], resource: str = "trainingjobs") -> None:
    """Give the service account `default` of the namespace these rights in it."""
    body: dict[str, Any] = {**ROLE, "rules": [{"apiGroups": ["everstep.dev"], "resources": [resource], "verbs": verbs}]}
    kubectl(plane, "-n", namespace, "apply", "--server-side", "-f", "-", input=json.dumps(body))
    account = f"--serviceaccount={namespace}:default"
    plane.kubectl("-n", namespace, "create", "rolebinding", "reads-jobs", "--role=reads-jobs", account)


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[ClientSession]:
    """A reader of the page of an operator that leads in the place."""
    (port,) = free_ports(1)
    async with (
        Operators(place).run(page_port=port),
        ClientSession(f"http://127.0.0.1:{port}") as session,
    ):

        async def serves() -> bool:
            with contextlib.suppress(ClientConnectionError):  # it does not listen yet
                async with session.get("/static/page.css") as answer:
                    return answer.status == 200
            return False

        await eventually("the page is served", serves)
        yield session


@asynccontextmanager
async def of_all_namespaces(place: Place) -> AsyncIterator[ClientSession]:
    """As `opened`. Operators of tests see their own namespaces alone; this page sees all."""
    clock = SystemClock()
    caches = Caches.of(place.client, JOBS, clock=clock, rng=random.random, relisted=lambda _: None)
    listener = page_server(caches, place.client, clock, "127.0.0.1", 0)
    watching = asyncio.create_task(caches.run())
    try:
        await caches.wait_synced()
        async with (
            Operators(place).run(),
            listener,
            ClientSession(f"http://127.0.0.1:{listener.port}") as session,
        ):
            yield session
    finally:
        await cancel(watching)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_reader_sees_the_jobs_that_its_own_account_may_get_and_no_trace_of_others(
    crd: ControlPlane, place: Place, new_place: NewPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "TTL", 1.0)
    other = await new_place()
    await place.create_job()
    await other.create_job("veiled")
    allow(crd, place.namespace, ["get"])
    token = kubectl(crd, "-n", place.namespace, "create", "token", "default")
    weak = kubectl(crd, "-n", other.namespace, "create", "token", "default")
    async with of_all_namespaces(place) as session:
        await place.running("digits-w0-0", "digits-w1-0")

        async def get(path: str, token: str) -> tuple[int, Any, str]:
            async with session.get(path, headers=bearer(token)) as answer:
                text = await answer.text()
                assert answer.headers.items() >= HEADERS.items()
                document = parsed(text)
                assert not [*active_parts(document)]
                return answer.status, document, text

        for wrong in ("", "x", f"{token[:-6]}xxxxxx", EVIL):
            code, document, text = await get("/", wrong)
            assert (code, "digits" in text, len([*document.iter("textarea")])) == (401, False, 1)
        code, _, text = await get("/", token)
        assert (code, "digits" in text, "veiled" in text) == (200, True, False)
        assert other.namespace not in text, "not even the name of the namespace"
        _, _, never = await get(f"/jobs/{other.namespace}/never", token)
        code, _, hidden = await get(f"/jobs/{other.namespace}/veiled", token)
        assert code == 404
        assert hidden == never, "what may not be seen looks like what does not exist"
        for odd in ("%2e%2e/x", "a/b/c", f"{place.namespace}/", "", f"{place.namespace}%00/digits"):
            assert (await get(f"/jobs/{odd}", token))[0] == 404
        code, document, text = await get("/", weak)
        assert (code, "digits" in text, "veiled" in text) == (200, False, False)
        assert "you may get trainingjobs.everstep.dev" in text
        _, _, everything = await get("/", crd.token)
        assert "digits" in everything
        assert "veiled" in everything

        job = f"/jobs/{place.namespace}/digits"
        code, document, _ = await get(job, token)
        assert code == 200
        assert [row[0] for row in table(document, "workers")] == ["0", "1"]
        drawn = words(next(e for e in document.iter("section") if e.get("aria-labelledby") == "timeline"))
        assert "worker 1" in drawn
        assert "█" in drawn, "a pod that is Ready trains"
        await place.end("digits-w1-0", 1, message=EVIL)

        async def lost() -> bool:
            return bool((await place.status()).get("recoveries")) or await place.reason() != "Running"

        await eventually("the loss is noticed", lost)

        async def told() -> bool:
            _, document, _ = await get(job, token)
            return ["Warning", "WorkerLost"] in [row[1:3] for row in table(document, "events")]

        await eventually("the event of the loss is read from the API server", told)
        code, _, text = await get(f"/stacks/{place.namespace}/digits", token)
        assert code == 503
        assert "everstep stacks digits -n" in text

        kubectl(crd, "-n", place.namespace, "delete", "rolebinding", "reads-jobs")

        async def gone() -> bool:
            return (await get(job, token))[0] == 404

        await eventually("a right that was taken away", gone)


async def test_job_that_was_run_again_shows_its_earlier_run(crd: ControlPlane, place: Place) -> None:
    await place.create_job(recovery={"maxRestarts": 0})
    allow(crd, place.namespace, ["get"])
    token = kubectl(crd, "-n", place.namespace, "create", "token", "default")
    async with opened(place) as session:
        await place.running("digits-w0-0", "digits-w1-0")
        await place.end("digits-w1-0", 1, message="OSError: the store is full")

        async def has_failed() -> bool:
            return await place.reason() == "Failed"

        await eventually("the job has failed", has_failed)
        await place.edit_job(rerun=1)

        async def shows() -> bool:
            async with session.get(f"/jobs/{place.namespace}/digits", headers=bearer(token)) as answer:
                document = parsed(await answer.text())
            if not any(each.get("aria-labelledby") == "earlier-runs" for each in document.iter("section")):
                return False
            ((number, outcome, *_, restarts),) = table(document, "earlier-runs")
            assert (number, restarts) == ("0", "0")
            assert outcome.startswith("RestartBudgetExhausted")
            assert "OSError: the store is full" in outcome
            return True

        await eventually("the page has the earlier run", shows)


async def test_token_of_the_form_becomes_a_cookie_that_only_this_page_gets(crd: ControlPlane, place: Place) -> None:
    await place.create_job()
    allow(crd, place.namespace, ["get"])
    token = kubectl(crd, "-n", place.namespace, "create", "token", "default")
    async with opened(place) as session:
        same = {"Sec-Fetch-Site": "same-origin"}

        async def login(token: str, **headers: str) -> Any:
            return await session.post("/login", data={"token": token}, headers=headers, allow_redirects=False)

        assert (await login(token, **{"Sec-Fetch-Site": "cross-site"})).status == 403
        assert (await login(token, Origin="https://evil.example")).status == 403
        assert (await login("x" * 3801, **same)).status == 400
        assert (await login("", **same)).status == 400
        assert (await login("é", **same)).status == 400
        assert (await login("no", **same)).status == 401
        assert (await login("x" * 20_000, **same)).status == 413
        answer = await login(f" {token}\n", **same)
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        morsel = answer.cookies[reviews.COOKIE]
        assert (morsel["secure"], morsel["httponly"], morsel["samesite"], morsel["path"]) == (True, True, "Strict", "/")
        assert not morsel["domain"]
        cookie = {"Cookie": f"{reviews.COOKIE}={morsel.value}"}

        async def shown() -> bool:
            async with session.get("/", headers=cookie) as page:
                return page.status == 200 and "digits" in await page.text()

        await eventually("the cookie is enough", shown)
        async with session.get("/", headers=cookie) as page:
            assert f"system:serviceaccount:{place.namespace}:default" in await page.text()
        async with session.post("/logout", headers={**cookie, **same}, allow_redirects=False) as left:
            assert left.status == 303
            assert left.cookies[reviews.COOKIE]["max-age"] == "0"


async def test_tokens_that_are_tried_cost_few_reviews_and_nobody_elses_reading(crd: ControlPlane, place: Place) -> None:
    allow(crd, place.namespace, ["get"])
    token = kubectl(crd, "-n", place.namespace, "create", "token", "default")
    async with opened(place) as session:
        async with session.get("/", headers=bearer(token)) as answer:
            assert answer.status == 200

        async def attempt(number: int) -> int:
            async with session.get("/", headers=bearer(f"guess-{number}")) as answer:
                return answer.status

        codes = [await attempt(number) for number in range(reviews.STRANGERS + 5)]
        assert codes.count(401) == reviews.STRANGERS - 1, "the reader's own was one of them"
        assert codes[-1] == 503
        async with session.get("/", headers=bearer(token)) as answer:
            assert answer.status == 200, "who is known reads on"
        waiting = [asyncio.create_task(attempt(number)) for number in range(50)]
        assert set(await asyncio.gather(*waiting)) == {503}
