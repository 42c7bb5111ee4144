"""JSON logs: what a line holds, and what it must never hold."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from everstep.contract import redact as secrets
from everstep_operator.plan import sanitize
from everstep_operator.telemetry import log_redaction, logs

JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzeXN0ZW0ifQ.c2lnbmF0dXJl"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    out = io.StringIO()
    logs.setup("debug", out)
    yield out
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_record_with_extra_becomes_one_json_line(stream: io.StringIO) -> None:
    extra = {"job": "digits", "namespace": "team-a", "pod": "digits-w1-0", "round": 3, "reason": "NodeLost"}
    logging.getLogger("everstep.test").info("worker %s\nreplaced", 1, extra=extra)
    (line,) = lines(stream)
    assert line.pop("time").endswith("Z")  # type: ignore[attr-defined]
    assert line == {"level": "info", "logger": "everstep.test", "msg": "worker 1\nreplaced", **extra}


def test_extra_named_like_a_field_of_the_line_does_not_replace_it(stream: io.StringIO) -> None:
    logging.getLogger("t").info("real", extra={"level": "forged", "msg2": float("nan")})
    (line,) = lines(stream)
    assert (line["level"], line["msg2"]) == ("info", "nan")


def test_exception_is_in_the_line_and_redacted(stream: io.StringIO) -> None:
    try:
        raise RuntimeError(f"refused: Bearer {JWT}")
    except RuntimeError:
        logging.getLogger("t").exception("call failed")
    (line,) = lines(stream)
    assert "RuntimeError: refused: Bearer [redacted]" in str(line["error"])
    assert JWT not in stream.getvalue()


def test_arguments_that_do_not_fit_are_reported_not_raised() -> None:
    record = logging.makeLogRecord({"msg": "%d steps", "args": ("many",)})
    line = json.loads(logs.JsonFormatter().format(record))
    assert "its arguments do not fit" in str(line["msg"])


def test_long_message_is_cut(stream: io.StringIO) -> None:
    logging.getLogger("t").info("x" * 100_000, extra={"note": "y" * 100_000})
    (line,) = lines(stream)
    assert len(str(line["msg"])) == len(str(line["note"])) == logs.MAX_TEXT


def test_level_is_obeyed_and_unknown_level_is_an_error(stream: io.StringIO) -> None:
    logs.setup("warning", stream)
    logging.getLogger("t").info("quiet")
    assert lines(stream) == []
    with pytest.raises(ValueError, match="LOUD"):
        logs.setup("loud", stream)


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer s3cr3tvalue",
        f"token is {JWT}",
        "postgres://user:s3cr3tvalue@host/db",
        "https://b.s3/x?X-Amz-Signature=s3cr3tvalue&other=1",
        "AWS_SECRET_ACCESS_KEY=s3cr3tvalue",
        '{"password": "s3cr3tvalue"}',
        "key AKIAIOSFODNN7EXAMPLE used",
    ],
)
def test_credential_in_text_is_hidden(text: str) -> None:
    hidden = secrets.text(text)
    assert secrets.HIDDEN in hidden
    for secret in ("s3cr3tvalue", JWT, "AKIAIOSFODNN7EXAMPLE"):
        assert secret not in hidden


@pytest.mark.parametrize(
    "text", ["worker digits-w1-0 lost: NodeLost", "http://10.0.0.1:8080/v1/report", "step 12 of 600"]
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert secrets.text(text) == text


def test_nested_values_are_redacted_and_bounded() -> None:
    deep: object = "end"
    for _ in range(50):
        deep = [deep]
    got = log_redaction.value(
        {"env": [{"name": "A", "api_key": "abc"}], "password": ["a", "b"], "deep": deep, "many": range(1000)}
    )
    assert isinstance(got, dict)
    assert got["env"] == [{"name": "A", "api_key": secrets.HIDDEN}]
    assert got["password"] == secrets.HIDDEN
    assert len(got["many"]) == log_redaction.MAX_ITEMS
    assert json.dumps(got["deep"]).count("[") < 10


@pytest.mark.parametrize("name", ["HF_TOKEN", "basicAuth", "ENCRYPTION_KEY", "private", "Cookie", "db-passwd"])
def test_field_whose_value_a_plan_would_hide_is_hidden_in_a_log_too(name: str, stream: io.StringIO) -> None:
    spec = {"spec": {"containers": [{"env": [{"name": name, "value": "hunter2"}]}]}}
    assert sanitize._secrets(spec) == ("hunter2",)
    logging.getLogger("t").info("said", extra={name: "hunter2", "key": "team-a/digits", "keys": 3})
    (line,) = lines(stream)
    assert (line[name], line["key"], line["keys"]) == ("[redacted]", "team-a/digits", 3)


def test_switch_whose_name_sounds_secret_hides_no_word_of_a_message() -> None:
    env = [{"name": "TOKENIZERS_PARALLELISM", "value": "false"}, {"name": "HF_TOKEN", "value": "hunter2"}]
    assert sanitize._secrets({"spec": {"containers": [{"env": env}]}}) == ("hunter2",)
