"""What an agent makes of 401: at first a mistake that is said at once, later perhaps a moment. Over sockets."""

import asyncio
from pathlib import Path

import pytest

from everstep.contract.messages import REPORT_PATH, Phase, Report
from everstep.membership.backends.operator_calls import Limits, OperatorCalls
from everstep.membership.errors import StoreRefused, StoreUnavailable
from everstep_operator.endpoint.auth import LeaderHere, RequestAuth
from support.operator.report_server import report_server
from support.operator.tokens import POD, Authority, Reviewer

BODY = Report(Phase.TRAIN, rank=0, world_size=2, at=100.0, step=5).encode()
CLUSTER = Authority()


async def test_agent_that_was_accepted_asks_again_for_some_time_before_401_ends_it(tmp_path: Path) -> None:
    reviewer, file, now = Reviewer(CLUSTER), tmp_path / "token", 0.0
    token = reviewer.issue(POD)
    file.write_text(token)
    server = report_server(
        RequestAuth(reviewer.cache(), LeaderHere),
    )
    async with server, asyncio.timeout(60):

        async def call(calls: OperatorCalls) -> int:
            reviewer.now += 100  # no answer is kept
            reply = await asyncio.to_thread(calls.call, "POST", REPORT_PATH, expect={204}, body=BODY)
            return reply.status

        url = f"http://127.0.0.1:{server.port}"
        calls = OperatorCalls(url, str(file), clock=lambda: now)
        stranger = OperatorCalls(url, str(file), clock=lambda: now)
        try:
            for _ in range(2):  # an answer in between begins the time anew
                assert await call(calls) == 204
                del reviewer.valid[token]
                for _ in range(3):
                    with pytest.raises(StoreUnavailable, match=r"401: the token is not valid.*accepted before"):
                        await call(calls)
                    now += Limits().unauthorized / 3 - 0.1
                reviewer.valid[token] = POD
            del reviewer.valid[token]
            with pytest.raises(StoreRefused, match="401"):
                await call(stranger)
            now += 1
            with pytest.raises(StoreRefused, match="401"):
                await call(calls)
        finally:
            calls.close()
            stranger.close()
