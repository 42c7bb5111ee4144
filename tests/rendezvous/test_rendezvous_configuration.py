"""`--rdzv-conf`: torch's own keys, and how long a first round waits."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.elastic.rendezvous as torch_rendezvous

from everstep.contract import env
from everstep.contract.document import Document, Sizes
from everstep.membership.backends import configuration
from everstep.membership.backends.configuration import Configuration, read, read_operator
from everstep.membership.commands import Form, Join, Leave, Waited
from everstep.membership.proposals import Patience
from support.rendezvous.documents import after, agent, joined

IN_A_POD = {env.TOKEN_FILE: "/token"}


def test_every_key_that_torchs_own_handlers_read_is_known() -> None:
    folder = Path(torch_rendezvous.__file__).parent
    code = "\n".join(path.read_text() for path in folder.glob("*.py"))
    params = r"params(?:\.config)?\.get(?:_as_int|_as_bool)?\(\s*\"(\w+)\""
    found = set(re.findall(params, code)) | {
        f"{name}_timeout" for name in re.findall(r"_get_timeout\(params, \"(\w+)\"", code)
    }
    assert {"join_timeout", "is_host", "read_timeout", "etcd_prefix"} <= found, "torch reads its keys in another way"
    ours = {"timeout", "close_timeout", "protocol"}
    assert found - ours == set(configuration.KEYS)


def test_torchs_keys_mean_what_they_mean_in_torch() -> None:
    conf = {
        "timeout": 900,  # which torchrun always adds
        "join_timeout": "300", "last_call_timeout": "7", "close_timeout": "8",
        "keep_alive_interval": "2", "keep_alive_max_attempt": "4",
        "protocol": "https", "ssl_cert": "c", "ssl_cert_key": "k", "ca_cert": "a", "etcd_prefix": "/jobs",
    }  # fmt: skip
    assert read(conf, "etcd") == Configuration(
        ("https://etcd:2379",), timeout=300.0, last_call=7.0, close_timeout=8.0, ttl=8.0, cert_file="c", key_file="k",
        ca_file="a", prefix="/jobs",
    )  # fmt: skip
    assert read({"keep_alive_max_attempt": "2"}, "etcd").ttl == 10.0, "torch's interval is 5 s"


@pytest.mark.parametrize("backend", ["etcd-v3", "everstep"])
def test_keys_of_torchs_without_meaning_are_named_in_one_warning(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    conf: dict[str, Any] = {"is_host": "1", "read_timeout": "60", "store_type": "tcp", "heartbeat_timeout": "5"}
    with caplog.at_level(logging.WARNING):
        found = read(conf, "etcd") if backend == "etcd-v3" else read_operator(conf, "operator", IN_A_POD)
    assert found == Configuration(found.urls, token_file=found.token_file)
    (said,) = caplog.messages
    assert all(key in said for key in conf)


def test_a_client_certificate_for_the_operator_is_named_as_without_meaning(caplog: pytest.LogCaptureFixture) -> None:
    assert read_operator({"ssl_cert": "c"}, "operator", IN_A_POD).cert_file == ""
    assert "ssl_cert (it is for another backend)" in caplog.text


def call(patience: Patience, document: Document) -> float:
    """Seconds that the document has to stand still until its round is formed with fewer than the maximum."""
    return next(tenth / 10 for tenth in range(1000) if patience.waited(tenth / 10, document) is not Waited.NOTHING)


def test_the_first_round_waits_as_long_as_torchs_until_all_expected_agents_were_seen() -> None:
    sizes = Sizes(1, 3)
    patience = read({}, "etcd").settings.patience
    two = joined(sizes, "a", "b")
    assert call(patience, two) == 30.0
    formed = after(two, Form("a", 0, Waited.LAST_CALL))
    nobody = after(formed, Leave("a"), Leave("b"))
    assert call(patience, after(nobody, Join(agent("c"), sizes))) == 30.0, "the third has never been seen"
    three = after(joined(sizes, "a", "b", "c"), Form("a", 0, Waited.NOTHING))
    nobody = after(three, *(Leave(name) for name in "abc"))
    assert call(patience, after(nobody, Join(agent("d"), sizes), Join(agent("e"), sizes))) == 5.0


def test_a_last_call_that_is_given_holds_for_every_round() -> None:
    patience = read({"last_call_timeout": "7"}, "etcd").settings.patience
    assert call(patience, joined(Sizes(1, 3), "a")) == 7.0


def test_members_that_do_not_come_back_are_waited_for_however_long_a_last_call_is() -> None:
    patience = read({"last_call": "60", "rejoin": "20"}, "etcd").settings.patience
    formed = after(joined(Sizes(2, 3), "a", "b", "c"), Form("a", 0, Waited.NOTHING))
    waiting = after(formed, Leave("b"), Join(agent("a"), Sizes(2, 3)))
    assert call(patience, waiting) == 20.0
