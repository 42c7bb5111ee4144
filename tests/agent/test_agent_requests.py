"""Who may ask an agent for the stacks of its processes, and how it is found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.decide.stall import Watch
from everstep.agent.hang.watcher import Watcher
from everstep.agent.processes.output import Files
from everstep.agent.processes.running import Running
from everstep.cli.agents import NoAgent, ask
from everstep.contract import agent_requests
from everstep.jobs.source import Where

NOBODY = 65534


def asks(name: str, user: int | None) -> int:
    """Connect in a child, which is this user's or becomes another one; its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:  # nothing of this process's may run on in the child
        if user is not None:
            os.setuid(user)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(name)
            connection.recv(1)
    finally:
        os._exit(0)


def test_agent_is_found_by_its_user_and_knows_who_asks() -> None:
    name = agent_requests.new_address({"digits"})
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        server.settimeout(30)
        assert name in agent_requests.addresses()
        users = [None, *([NOBODY] if os.getuid() == 0 else [])]  # only root can become another user
        for user in users:
            asker = asks(name, user)
            try:
                connection, _ = server.accept()
                with connection:
                    assert agent_requests.is_of_this_user(connection) is (user is None)
            finally:
                os.waitpid(asker, 0)
    assert name not in agent_requests.addresses(), "nothing is left of an agent that has ended"


def test_only_the_agents_of_the_job_that_is_meant_are_asked() -> None:
    """A frozen agent of another job answers nobody: who asks for this job must not wait for it, nor hear of it."""
    job, longest = f"asked-{secrets.token_hex(8)}", "x" * 300
    with frozen_agent(job) as mine, frozen_agent(longest, job) as both, frozen_agent(f"{job}-2") as other:
        assert sorted(agent_requests.addresses(job)) == sorted([mine, both])
        assert agent_requests.addresses(longest) == [both]
        assert {mine, both, other} <= set(agent_requests.addresses())
        with pytest.raises(NoAgent):
            ask("nobody", Where(), agent_requests.STACKS, 60.0, [])
        (answer,) = ask(longest, Where(), agent_requests.STACKS, 0.1, [])
        assert f"the agent at {both[1:]} does not answer" in answer["error"]
        with pytest.raises(NoAgent, match="several jobs run on this machine: one that does not answer, one that"):
            ask(job, Where(), agent_requests.STACKS, 0.1, [])


@contextlib.contextmanager
def frozen_agent(*jobs: str) -> Iterator[str]:
    """It listens, and never answers. Gives its address."""
    address = agent_requests.new_address(jobs)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        yield address


class Silent:
    """An agent's ways to a process that does not answer: a program without an interpreter."""

    def tell(self, pid: int, **message: Any) -> None:
        pass

    def signal(self, pid: int, number: int, *, group: bool) -> None:
        os.kill(pid, number)


def test_program_without_a_handler_is_not_ended_by_the_question_where_it_is(tmp_path: Path) -> None:
    files = Files(None, None, *(tmp_path / name for name in ("error", "stacks", "calls")))
    ways: Any = Silent()
    with subprocess.Popen(["sleep", "600"]) as program:
        try:
            watcher = Watcher({}, lambda: None, lambda event: None, ways, ways, "sleep", tmp_path)
            answer = asyncio.run(watcher.stacks_of(program.pid, Running(0, 0, files, Watch(60.0, 3.0))))
            assert answer["stacks"] == ""
            assert program.poll() is None, "the signal for its stacks ended it"
        finally:
            program.send_signal(signal.SIGKILL)
