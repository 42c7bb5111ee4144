"""The script's checkpoint URL counts before the environment's, and a warning says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from everstep.checkpoint.log import opening
from everstep.checkpoint.log.opening import Settings

HERE = str(Path.cwd() / "commits")


def resolve(url: str | None, environ: dict[str, str]) -> str:
    return Settings.resolve(environ, url, None, None, None, None, None, None).url


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_compared", set())


@pytest.mark.parametrize(
    ("named", "environment", "is_warned"),
    [
        ("commits", "s3://bucket/run", True),
        ("commits", "/elsewhere/commits", True),
        ("s3://bucket/run", "s3://bucket/other", True),
        ("s3://bucket/run/", "s3://bucket/run", False),
        ("commits", HERE, False),
        ("./commits", f"file://{HERE}", False),
        ("commits", "", False),
        (None, "s3://bucket/run", False),
    ],
)
def test_url_of_the_environment_that_the_script_does_not_use_is_named_with_the_one_that_counts(
    named: str | None, environment: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"EVERSTEP_CHECKPOINT_URL": environment}
    with caplog.at_level(logging.WARNING, "everstep"):
        assert resolve(named, environ) == (named or environment)
        assert resolve(named, environ) == (named or environment)
    warned = [text for text in caplog.messages if "EVERSTEP_CHECKPOINT_URL" in text]
    assert len(warned) == is_warned, "once in a process"
    for text in warned:
        assert f"the checkpoint URL {named}, and that counts" in text
        assert f"EVERSTEP_CHECKPOINT_URL={environment}" in text


def test_url_of_the_environment_that_nobody_chose_is_no_cause_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"EVERSTEP_CHECKPOINT_URL": "file:///runs/1/checkpoints", "EVERSTEP_CHECKPOINT_DEFAULT": "1"}
    assert resolve("commits", environ) == "commits"
    assert resolve(None, environ) == "file:///runs/1/checkpoints"
    assert caplog.text == ""


def test_script_that_saves_where_the_environment_says_may_save_elsewhere_too(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"EVERSTEP_CHECKPOINT_URL": "s3://bucket/run"}
    resolve(None, environ)
    resolve("best", environ)
    resolve("best", {**environ, "EVERSTEP_CHECKPOINT_URL": "s3://bucket/later", "RANK": "1"})
    assert "that counts" not in caplog.text
