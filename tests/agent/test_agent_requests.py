"""Who may ask an agent for the stacks of its processes, and how it is found."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys

from everstep.contract import agent_requests

NOBODY = 65534
CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1]); s.recv(1)"


def test_agent_is_found_by_its_user_and_knows_who_asks() -> None:
    name = agent_requests.name_of(secrets.token_hex(8))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        assert name in agent_requests.addresses()
        users = [None, *([NOBODY] if os.getuid() == 0 else [])]  # only root can become another user
        for user in users:
            asker = subprocess.Popen([sys.executable, "-S", "-E", "-c", CONNECT, name[1:]], user=user, cwd="/")
            try:
                connection, _ = server.accept()
                with connection:
                    assert agent_requests.is_of_this_user(connection) is (user is None)
            finally:
                asker.wait(30)
    assert name not in agent_requests.addresses(), "nothing is left of an agent that has ended"
